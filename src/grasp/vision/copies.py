"""Find rows of a corpus that are exact copies of trusted units.

A unit is a scored element of a target, such as a question with its answer. A row that equals one would make any score
against this unit meaningless. Start with `exact_copies`.

Shape letter: L tokens.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from grasp.artifact.reader import ArtifactReader
from grasp.errors import GraspError
from grasp.models.build_source import BuildSource
from grasp.vision.images import HASH_LABEL, hash_of_unit
from grasp.vision.reader import ImageReader

SNIPPET_CHARS = 240  # default length of a stored snippet, in characters
UnitAndRow = tuple[int, int]  # (unit within the target, row)


def exact_copies(artifact: ArtifactReader, target: str) -> tuple[list[UnitAndRow], str | None]:
    """Return rows that equal a unit of `target` in pixels, or in tokens apart from end-of-text tokens around them.

    Without tokens or their tokenizer, rows with a complete snippet are compared by text.

    Returns:
        Pairs sorted by unit, then row; and a note if not all rows could be compared.
    """
    units = artifact.units.take(pa.array(artifact.unit_columns(target))).to_pylist()
    if isinstance(artifact.reader, ImageReader):
        hashes = [hash_of_unit(unit["prompt"]) for unit in units]
        return sorted(_matching_pairs(hashes, ([key] for key in column_values(artifact, HASH_LABEL)))), None
    limit = int(artifact.manifest.settings.get("corpus", {}).get("snippet_chars", SNIPPET_CHARS))
    n_cut = 0

    def complete_snippets() -> Iterator[list[str]]:
        nonlocal n_cut
        for text in column_values(artifact, "snippet"):
            is_complete = text is not None and len(text) < limit
            n_cut += not is_complete
            yield [text] if is_complete else []

    unit_texts = [" ".join((unit["prompt"] + unit["completion"]).split()) for unit in units]
    pairs = _matching_pairs(unit_texts, complete_snippets())
    note = None
    try:
        pairs |= _token_copies(BuildSource(artifact), units)
    except GraspError as err:
        if n_cut:
            note = f"{n_cut:,} rows were not compared with the trusted units, since tokens are not available: {err}"
    return sorted(pairs), note


def _token_copies(source: BuildSource, units: Sequence[Mapping[str, Any]]) -> set[UnitAndRow]:
    """Compare rows with units encoded as one text, and as separate prompt and completion."""
    rows, encode, eos_id = source.rows, source.tokenizer.encode, source.tokenizer.eos_id
    prompts, completions = (encode([unit[field] for unit in units]) for field in ("prompt", "completion"))
    as_one_text = encode([unit["prompt"] + unit["completion"] for unit in units])
    as_two_texts = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
    documents_of_units = [_documents_of(ids, eos_id) for ids in (*as_one_text, *as_two_texts)]
    unit_keys = [documents[0] if len(documents) == 1 else b"" for documents in documents_of_units]
    shards = (rows.shard(k) for k in range(rows.n_shards))
    row_keys = (_documents_of(shard.ids(i), eos_id) for shard in shards for i in range(len(shard)))
    return {(unit % len(units), row) for unit, row in _matching_pairs(unit_keys, row_keys)}


def _documents_of(ids: Sequence[int] | NDArray[np.int32], eos_id: int | None) -> list[bytes]:
    """Split token ids at end-of-text tokens, which separate documents packed into one row."""
    ids_L = np.asarray(ids, dtype=np.int32)
    ends = np.flatnonzero(ids_L == eos_id) if eos_id is not None else ids_L[:0]
    text_L = np.delete(ids_L, ends)
    return [document.tobytes() for document in np.split(text_L, ends - np.arange(len(ends))) if len(document)]


def _matching_pairs(unit_keys: Sequence[Any], row_keys: Iterable[Sequence[Any]]) -> set[UnitAndRow]:
    """Return (unit, row) of rows that share a key with a unit; empty keys never match."""
    units_of: dict[Any, list[int]] = {}
    for unit, key in enumerate(unit_keys):
        if key:
            units_of.setdefault(key, []).append(unit)
    return {(unit, row) for row, keys in enumerate(row_keys) for key in keys for unit in units_of.get(key, ())}


def column_values(artifact: ArtifactReader, name: str) -> Iterator[Any]:
    """Yield the values of a column of the row table."""
    for batch in artifact.row_batches([name]):
        yield from batch.column(0).to_pylist()
