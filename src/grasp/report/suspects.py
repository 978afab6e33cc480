"""The section of suspicious rows: what `grasp detect --out` wrote, read back, proved, and as the template reads it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from pydantic import TypeAdapter, ValidationError

from grasp.artifact.reader import ArtifactReader
from grasp.audit.detect import RECORD, DetectionRecord, made_from
from grasp.corpus.labels import HASH_LABEL
from grasp.errors import SettingsError
from grasp.extract.pictures import vision
from grasp.extract.reopen import BuildSource
from grasp.predict.rows import row_places
from grasp.report.texts import number, signed
from grasp.store.contents import readable_table
from grasp.store.sealed import sealed_batches
from grasp.text import name, plain
from grasp.yaml_files import describe

OWN_COLUMNS = ("rank", "row_id", "flagged")  # of the table; the others are scores
SHOWN = 12
LARGEST = 160  # pixels of a picture's longer side


@dataclass(frozen=True, slots=True)
class ShownSuspects:
    """A detection with the rows that are shown: lines of its table, and of the row table, with labels and a PNG."""

    record: DetectionRecord
    lines: tuple[Mapping[str, Any], ...]
    rows: tuple[Mapping[str, Any], ...]
    labels: tuple[str, ...]
    pictures: tuple[bytes | None, ...]  # none: rows are texts, or the artifact keeps no images


def read_suspects(path: Path, artifact: ArtifactReader, labels: Sequence[str]) -> ShownSuspects:
    """The first rows of a table that `grasp detect --out` wrote of this artifact.

    Raises:
        SettingsError: no such file, not such a table, or one of another artifact.
    """
    record, lines = _table(path, artifact)
    names = [line["row_id"] for line in lines]
    places = row_places(artifact, names)
    if strange := [name for name in names if name not in places]:
        raise SettingsError(f"--detect: {path}: {strange[0]!r} is no row of the artifact; run grasp detect on it")
    index = np.array([places[name] for name in names], dtype=np.int64)
    return ShownSuspects(
        record,
        tuple(lines),
        tuple(artifact.rows(index).to_pylist()),
        tuple(label for label in labels if label != HASH_LABEL),
        tuple(vision().row_pictures(artifact, index, LARGEST))
        if BuildSource(artifact).has_images
        else (None,) * len(index),
    )


def _table(path: Path, artifact: ArtifactReader) -> tuple[DetectionRecord, list[dict[str, Any]]]:
    written = "the .parquet that grasp detect --out writes"
    expected = f"expected {written}"
    with readable_table(f"--detect: {path}", SettingsError, written):
        metadata = (pq.read_schema(path).metadata or {}).get(RECORD)
        batch = None
        for part in sealed_batches(path):  # all of it is proven
            batch = part.slice(0, SHOWN) if batch is None else batch
    if metadata is None or batch is None or not {"rank", "row_id", "flagged"} <= set(batch.schema.names):
        raise SettingsError(f"--detect: {path} does not say what was detected; {expected}")
    try:
        record = TypeAdapter(DetectionRecord).validate_json(metadata)
    except ValidationError as err:
        raise SettingsError(f"{describe(err, f'--detect: {path}')}; {expected}") from err
    own = made_from(artifact, record.target) | {"rows": str(artifact.n_rows)}
    theirs = record.made_from | {"rows": str(record.rows)}
    if others := [what for what in own if own[what] != theirs.get(what)]:
        listed = ", ".join(f"{what} {theirs.get(what)!r}, here {own[what]!r}" for what in others)
        raise SettingsError(f"--detect: {path} was made from another artifact: {listed}; run grasp detect on this one")
    return record, batch.to_pylist()


def suspects_view(found: ShownSuspects) -> dict[str, Any]:
    """What was flagged and by what, how the scores compare with the truth, and the first rows."""
    record, detections = found.record, found.record.detections
    some = next(iter(detections.values()), None)
    return {
        "head": f"Held against {name(record.target)}. {plain(record.headline)}",
        "ranking": name(record.ranking),
        "measured": [
            {
                "name": name(score),
                "auroc": {
                    "value": number(one.auroc),
                    "interval": f"[{number(one.auroc_low)}, {number(one.auroc_high)}]",
                },
                "precision": number(one.average_precision),
                "at_k": [number(value) for value in one.at_k.shares],
                "best": f"{number(one.best.f1)} at {one.best.k:,}",
            }
            for score, one in detections.items()
        ],
        "truth": "" if some is None else f"{some.n_planted:,} rows",
        "k": "" if some is None else f"{some.at_k.k:,}",
        "rows": [
            _row_view(line, row, picture, found)
            for line, row, picture in zip(found.lines, found.rows, found.pictures, strict=True)
        ],
        "notes": [plain(note) for note in record.notes],
    }


def _row_view(
    line: Mapping[str, Any], row: Mapping[str, Any], picture: bytes | None, found: ShownSuspects
) -> dict[str, Any]:
    ranking = found.record.ranking
    others = [score for score in line if score not in (*OWN_COLUMNS, ranking)]
    return {
        "rank": line["rank"],
        "flagged": line["flagged"],
        "scores": [(name(score), signed(line[score])) for score in (ranking, *reversed(others))],
        "labels": list(dict.fromkeys(str(row[label]) for label in found.labels if row[label] is not None)),
        "row_id": line["row_id"],
        "text": row["snippet"] or "",
        "picture": None if picture is None else vision().picture_url(picture),
    }
