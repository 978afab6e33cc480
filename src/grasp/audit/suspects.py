"""What `grasp detect --out` wrote, read back: the most suspicious rows with their text or picture."""

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import ValidationError

from grasp.artifact.reader import Artifact
from grasp.choose.summaries import Summary
from grasp.corpus.image_store import HASH_LABEL, ImageStore
from grasp.corpus.images import decode_image
from grasp.errors import CorpusError, SettingsError
from grasp.settings import describe

SAID: Final = b"grasp.suspects"
OWN_COLUMNS = ("rank", "row_id", "flagged", "unit_id", "exact_copy")  # of the table; the others are scores
SHOWN = 12
LARGEST = 160  # pixels of a picture's longer side


class Cut(Summary):
    """The threshold, and what it was made for."""

    value: float
    false_positive_rate: float
    n_flagged: int
    expected_false: float
    null: str


class AtRank(Summary):
    """What the first k rows hold."""

    k: int
    precision: float
    recall: float
    f1: float


class Measured(Summary):
    """A score against the truth."""

    n_rows: int
    n_planted: int
    auroc: float
    auroc_low: float
    auroc_high: float
    average_precision: float
    at_k: AtRank
    best: AtRank


class Said(Summary):
    """What the table's metadata holds."""

    target: str
    ranking: str
    made_from: dict[str, str]
    rows: int
    threshold: Cut
    detections: dict[str, Measured]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SuspectRow:
    """One row; `picture` is a PNG, where the artifact is of images and keeps them."""

    rank: int
    row_id: str
    flagged: bool
    is_copy: bool  # of the unit, to the letter
    scores: tuple[tuple[str, float], ...]  # the ranking one last
    unit: tuple[str, str, str] | None  # that it looks like, for contamination: unit_id, prompt, completion
    labels: tuple[tuple[str, str], ...]
    text: str
    picture: bytes | None


@dataclass(frozen=True, slots=True)
class SuspectSummary:
    """A detection without the rows that are not shown."""

    said: Said
    rows: tuple[SuspectRow, ...]


def read_suspects(path: Path, artifact: Artifact, labels: Sequence[str], flag: str = "--detect") -> SuspectSummary:
    """The first rows of a table that `grasp detect --out` wrote of this artifact.

    Raises:
        SettingsError: no such file, not such a table, or one of another artifact.
    """
    said, lines = _table(path, artifact, flag)
    index = _row_index(artifact, [line["row_id"] for line in lines], f"{flag}: {path}")
    kept = artifact.rows(index).to_pylist()
    pictures = _pictures(artifact, index)
    units = {unit["unit_id"]: unit for unit in artifact.units.select(["unit_id", "prompt", "completion"]).to_pylist()}
    shown = (_row(*parts, said, labels, units) for parts in zip(lines, kept, pictures, strict=True))
    return SuspectSummary(said, tuple(shown))


def _table(path: Path, artifact: Artifact, flag: str) -> tuple[Said, list[dict[str, Any]]]:
    expected = "expected the .parquet that grasp detect --out writes"
    try:
        with pq.ParquetFile(path) as file:
            metadata = (file.schema_arrow.metadata or {}).get(SAID)
            batch = next(file.iter_batches(batch_size=SHOWN), None)
    except FileNotFoundError as err:
        raise SettingsError(f"{flag}: {path}: no such file; {expected}") from err
    except (OSError, pa.ArrowException) as err:
        raise SettingsError(f"{flag}: {path} is not Parquet; {expected}") from err
    if metadata is None or batch is None or not {"rank", "row_id", "flagged"} <= set(batch.schema.names):
        raise SettingsError(f"{flag}: {path} does not say what was detected; {expected}")
    try:
        said = Said.model_validate_json(metadata)
    except ValidationError as err:
        raise SettingsError(f"{describe(err, f'{flag}: {path}')}; {expected}") from err
    own = made_from(artifact, said.target) | {"rows": str(artifact.n_rows)}
    theirs = said.made_from | {"rows": str(said.rows)}
    if others := [what for what in own if own[what] != theirs.get(what)]:
        listed = ", ".join(f"{what} {theirs.get(what)!r}, here {own[what]!r}" for what in others)
        raise SettingsError(f"{flag}: {path} was made from another artifact: {listed}; run grasp detect on this one")
    return said, batch.to_pylist()


def made_from(artifact: Artifact, target: str) -> dict[str, str]:
    """What scores of the rows depend on: the corpus, the model, the features, and the target's units."""
    digest = hashlib.blake2b(digest_size=16)
    for unit in artifact.units.select(["target", "unit_id", "prompt", "completion"]).to_pylist():
        if unit["target"] == target:
            digest.update(repr(tuple(unit.values())).encode())
    features = json.dumps(artifact.feature_settings, sort_keys=True, default=str).encode()
    fingerprints = {what: artifact.manifest.fingerprints.get(what, "") for what in ("corpus", "model")}
    return fingerprints | {
        "features": hashlib.blake2b(features, digest_size=8).hexdigest(),
        f"units of {target}": digest.hexdigest() if target in artifact.targets else "none",
    }


def _row_index(artifact: Artifact, names: Sequence[str], where: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Positions of some rows by name."""
    wanted = pa.array(names, pa.string())
    found: dict[str, int] = {}
    start = 0
    for batch in artifact.row_batches(["row_id"]):
        here = np.flatnonzero(pc.is_in(batch.column(0), value_set=wanted).to_numpy(zero_copy_only=False))
        found |= {batch.column(0)[int(i)].as_py(): start + int(i) for i in here}
        start += batch.num_rows
    if strange := [name for name in names if name not in found]:
        raise SettingsError(f"{where}: {strange[0]!r} is no row of the artifact; run grasp detect on it")
    return np.array([found[name] for name in names], dtype=np.int64)


def _pictures(artifact: Artifact, index: np.ndarray[Any, np.dtype[np.int64]]) -> list[bytes | None]:
    """Small PNGs of images; none where the rows are texts, or the artifact keeps no images."""
    if HASH_LABEL not in pq.read_schema(artifact.rows_path).names:
        return [None] * len(index)
    try:
        store = ImageStore.open(artifact.path / "tokens")
    except CorpusError:
        return [None] * len(index)  # built with keep_tokens: false
    return [_thumbnail(encoded) for encoded in store.rows(index).encoded]


def _thumbnail(encoded: bytes) -> bytes | None:
    """Decoded and encoded again: of the corpus's bytes nothing but colours reaches a page."""
    image = decode_image(encoded)
    if image is None:
        return None
    image.thumbnail((LARGEST, LARGEST))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def _row(
    line: Mapping[str, Any],
    row: Mapping[str, Any],
    picture: bytes | None,
    said: Said,
    labels: Sequence[str],
    units: Mapping[str, Mapping[str, str]],
) -> SuspectRow:
    unit = units.get(line.get("unit_id", ""))
    others = [name for name in line if name not in (*OWN_COLUMNS, said.ranking)]
    return SuspectRow(
        rank=line["rank"],
        row_id=line["row_id"],
        flagged=line["flagged"],
        is_copy=bool(line.get("exact_copy")),
        scores=tuple((name, float(line[name])) for name in (*others, said.ranking)),
        unit=None if unit is None else (unit["unit_id"], unit["prompt"], unit["completion"]),
        labels=tuple((name, str(row[name])) for name in labels if name != HASH_LABEL and row[name] is not None),
        text=row["snippet"] or "",
        picture=picture,
    )
