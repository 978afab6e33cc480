"""Rows that are a unit, whole and to the letter: images by their pixels, texts by their tokens."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from grasp.artifact.reader import ArtifactReader
from grasp.corpus.labels import CLASS_LABEL, HASH_LABEL
from grasp.corpus.store import RowStore
from grasp.errors import ArtifactError, GraspError
from grasp.extract.reopen import BuildSource

SNIPPET = 240  # characters, where the artifact does not say how many it keeps
Pair = tuple[int, int]  # unit, counted within the target; row


def exact_copies(artifact: ArtifactReader, target: str) -> tuple[list[Pair], str | None]:
    """Rows that are a unit of `target`: the same pixels, or the same tokens but for end-of-text tokens round them.

    Where the tokens or their tokenizer are not there, rows whose text the row table keeps whole are compared by it.

    Returns:
        The pairs, by unit, then row; and what could not be compared, in words.
    Raises:
        ArtifactError: no such target; an artifact of images whose units have no hash.
    """
    units = artifact.units.take(pa.array(artifact.unit_columns(target))).to_pylist()
    if {HASH_LABEL, CLASS_LABEL} <= set(pq.read_schema(artifact.rows_path).names):
        if units[0].get(HASH_LABEL) is None:
            raise ArtifactError(f"{artifact.where}: its units have no {HASH_LABEL}; build it again with this version")
        hashes = [unit[HASH_LABEL] for unit in units]
        return sorted(_pairs(hashes, ([key] for key in _values(artifact, HASH_LABEL)))), None
    limit = int(artifact.manifest.settings.get("corpus", {}).get("snippet_chars", SNIPPET))
    n_cut = 0

    def whole() -> Iterator[list[str]]:
        nonlocal n_cut
        for text in _values(artifact, "snippet"):
            is_whole = text is not None and len(text) < limit
            n_cut += not is_whole
            yield [text] if is_whole else []

    found = _pairs([" ".join((unit["prompt"] + unit["completion"]).split()) for unit in units], whole())
    note = None
    try:
        found |= _by_tokens(BuildSource(artifact), units)
    except GraspError as err:
        if n_cut:
            note = f"of {n_cut:,} rows it was not seen whether they are trusted units, tokens were not compared: {err}"
    return sorted(found), note


def _by_tokens(origin: BuildSource, units: Sequence[Mapping[str, Any]]) -> set[Pair]:
    """A unit's tokens as one text, and as prompt and completion apart."""
    rows, encode, eos_id = origin.rows, origin.tokenizer.encode, origin.tokenizer.eos_id
    assert isinstance(rows, RowStore)
    prompts, completions = (encode([unit[part] for unit in units]) for part in ("prompt", "completion"))
    joined = encode([unit["prompt"] + unit["completion"] for unit in units])
    apart = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
    keys = [_pieces(ids, eos_id) for ids in (*joined, *apart)]
    single = [own[0] if len(own) == 1 else b"" for own in keys]
    shards = (rows.shard(k) for k in range(rows.n_shards))
    row_keys = (_pieces(shard.ids(i), eos_id) for shard in shards for i in range(len(shard)))
    return {(unit % len(units), row) for unit, row in _pairs(single, row_keys)}


def _pieces(ids: Sequence[int] | NDArray[np.int32], eos_id: int | None) -> list[bytes]:
    """What stands between end-of-text tokens: documents that were packed into one row come apart."""
    ids_L = np.asarray(ids, dtype=np.int32)
    ends = np.flatnonzero(ids_L == eos_id) if eos_id is not None else ids_L[:0]
    inside_L = np.delete(ids_L, ends)
    return [piece.tobytes() for piece in np.split(inside_L, ends - np.arange(len(ends))) if len(piece)]


def _pairs(unit_keys: Sequence[Any], row_keys: Iterable[Sequence[Any]]) -> set[Pair]:
    """(unit, row) of every row of which a key is a unit's; empty keys are nobody's."""
    places: dict[Any, list[int]] = {}
    for unit, key in enumerate(unit_keys):
        if key:
            places.setdefault(key, []).append(unit)
    return {(unit, row) for row, keys in enumerate(row_keys) for key in keys for unit in places.get(key, ())}


def _values(artifact: ArtifactReader, name: str) -> Iterator[Any]:
    for batch in artifact.row_batches([name]):
        yield from batch.column(0).to_pylist()
