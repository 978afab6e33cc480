"""What `grasp detect --out` wrote, read back and proved: the rows of it that a report shows."""

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
from grasp.store.contents import readable_table
from grasp.store.sealed import sealed_batches
from grasp.yaml_files import describe

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
    """The first rows of a table that `grasp detect --out` wrote of this artifact."""
    written = "the .parquet that grasp detect --out writes"
    with readable_table(f"--detect: {path}", SettingsError, written):
        metadata = (pq.read_schema(path).metadata or {}).get(RECORD)
        batch = None
        for part in sealed_batches(path):  # all of it is proven
            batch = part.slice(0, SHOWN) if batch is None else batch
    if metadata is None or batch is None or not {"rank", "row_id", "flagged"} <= set(batch.schema.names):
        raise SettingsError(f"--detect: {path} does not say what was detected; expected {written}")
    try:
        record = TypeAdapter(DetectionRecord).validate_json(metadata)
    except ValidationError as err:
        raise SettingsError(f"{describe(err, f'--detect: {path}')}; expected {written}") from err
    own = made_from(artifact, record.target) | {"rows": str(artifact.n_rows)}
    theirs = record.made_from | {"rows": str(record.rows)}
    if others := [what for what in own if own[what] != theirs.get(what)]:
        listed = ", ".join(f"{what} {theirs.get(what)!r}, here {own[what]!r}" for what in others)
        raise SettingsError(f"--detect: {path} was made from another artifact: {listed}; run grasp detect on this one")
    lines = batch.to_pylist()
    places = row_places(artifact, [line["row_id"] for line in lines])
    if strange := [line["row_id"] for line in lines if line["row_id"] not in places]:
        raise SettingsError(f"--detect: {path}: {strange[0]!r} is no row of the artifact; run grasp detect on it")
    index = np.array([places[line["row_id"]] for line in lines], dtype=np.int64)
    pictures: Sequence[bytes | None] = [None] * len(index)
    if BuildSource(artifact).has_images:
        pictures = vision().row_pictures(artifact, index, LARGEST)
    return ShownSuspects(
        record,
        tuple(lines),
        tuple(artifact.rows(index).to_pylist()),
        tuple(label for label in labels if label != HASH_LABEL),
        tuple(pictures),
    )
