"""Rows that are a unit, whole and to the letter: images by their pixels, texts by their tokens."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from grasp.artifact.reader import Artifact
from grasp.corpus.image_store import HASH_LABEL
from grasp.errors import GraspError
from grasp.runs.material import Material

SNIPPET = 240  # characters, where the artifact does not say how many it keeps


@dataclass(frozen=True, slots=True)
class Copies:
    """Which rows are which units of a target."""

    pairs: tuple[tuple[int, int], ...]  # (unit, counted within the target; row), by unit, then row
    note: str | None  # what could not be compared

    def best(self, n_rows: int) -> NDArray[np.int64]:
        """The first unit that each row is, (N,); -1: none."""
        best_N = np.full(n_rows, -1, dtype=np.int64)
        for unit, row in reversed(self.pairs):
            best_N[row] = unit
        return best_N


def exact_copies(artifact: Artifact, target: str) -> Copies:
    """Rows that are a unit of `target`: the same pixels, or the same tokens but for end-of-text tokens round them.

    Where the tokens or their tokenizer are not there, rows whose text the row table keeps whole are compared by it.
    """
    units = artifact.units.take(pa.array(artifact.unit_columns(target))).to_pylist()
    if HASH_LABEL in pq.read_schema(artifact.rows_path).names:
        hashes = [unit["prompt"].split(",")[0].removeprefix("image ") for unit in units]
        return Copies(_pairs(_places(hashes), ([key] for key in _column(artifact, HASH_LABEL))), None)
    snippets = ["" if text is None else str(text) for text in _column(artifact, "snippet")]
    limit = int(artifact.manifest.settings.get("corpus", {}).get("snippet_chars", SNIPPET))
    whole = [text if len(text) < limit else "" for text in snippets]
    texts = [" ".join((unit["prompt"] + unit["completion"]).split()) for unit in units]
    found = set(_pairs(_places(texts), ([text] for text in whole)))
    try:
        found |= set(_by_tokens(Material(artifact), units))
    except GraspError as err:
        cut = whole.count("")
        note = f"of {cut:,} rows it was not seen whether they are trusted units, tokens were not compared: {err}"
        return Copies(tuple(sorted(found)), note if cut else None)
    return Copies(tuple(sorted(found)), None)


def _by_tokens(material: Material, units: Sequence[Mapping[str, Any]]) -> tuple[tuple[int, int], ...]:
    """A unit's tokens as one text, and as prompt and completion apart."""
    material.require_tokens()
    encode, eos_id = material.tokenizer.encode, material.tokenizer.eos_id
    prompts, completions = (encode([unit[part] for unit in units]) for part in ("prompt", "completion"))
    joined = encode([unit["prompt"] + unit["completion"] for unit in units])
    apart = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
    keys = [[_key(piece) for piece in _pieces(ids, eos_id)] for ids in (*joined, *apart)]
    single = [own[0] if len(own) == 1 else b"" for own in keys]
    return tuple(
        {(unit % len(units), row) for unit, row in _pairs(_places(single), _row_keys(material, eos_id))},
    )


def _row_keys(material: Material, eos_id: int | None) -> Iterator[list[bytes]]:
    for k in range(material.store.n_shards):
        shard = material.store.shard(k)
        for i in range(len(shard)):
            yield [_key(piece) for piece in _pieces(shard.ids(i), eos_id)]


def _pieces(ids: Sequence[int] | NDArray[np.int32], eos_id: int | None) -> list[NDArray[np.int32]]:
    """What stands between end-of-text tokens: documents that were packed into one row come apart."""
    ids_L = np.asarray(ids, dtype=np.int32)
    if eos_id is None:
        return [ids_L]
    ends = np.flatnonzero(ids_L == eos_id)
    return [piece for piece in np.split(ids_L[ids_L != eos_id], ends - np.arange(len(ends))) if len(piece)]


def _key(ids_L: NDArray[np.int32]) -> bytes:
    return ids_L.tobytes()


def _places(keys: Sequence[Any]) -> dict[Any, list[int]]:
    places: dict[Any, list[int]] = {}
    for place, key in enumerate(keys):
        if key:
            places.setdefault(key, []).append(place)
    return places


def _pairs(places: Mapping[Any, list[int]], rows: Iterable[Sequence[Any]]) -> tuple[tuple[int, int], ...]:
    """(unit, row) of every row of which a key is a unit's."""
    found = {(unit, row) for row, keys in enumerate(rows) for key in keys for unit in places.get(key, ())}
    return tuple(sorted(found))


def _column(artifact: Artifact, name: str) -> list[Any]:
    return [value for batch in artifact.row_batches([name]) for value in batch.column(0).to_pylist()]
