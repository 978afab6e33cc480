"""Which rows look wrong to a trusted target, and which hold a target's own text.

Shape letters: N rows, E units, D sketch width.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from grasp.artifact.reader import RELEVANCE, Artifact
from grasp.audit.copies import Copies, exact_copies
from grasp.audit.detection import (
    Agreement,
    Detection,
    Threshold,
    agreement,
    mean_ranks,
    measure,
    threshold,
    threshold_like,
    threshold_of_checked,
)
from grasp.audit.neighbours import disagreement
from grasp.audit.ranking import rows_by_method
from grasp.baselines.asked import AskedMethod
from grasp.errors import ArtifactError, SettingsError
from grasp.extract.progress import Progress, Silent
from grasp.predict.labels import LabelColumn
from grasp.predict.slices import LabelTable
from grasp.predict.source import Blocks
from grasp.results import Result

F64 = NDArray[np.float64]
RECORD: Final = b"grasp.suspects"
NEIGHBOURS = 10
FALSE_POSITIVES = 0.01
CLASS_LABEL = "image_class"
LISTED = 10
LEAST_ROWS = 10  # fewer have no distribution to speak of
KERNELS = ("token", "pooled", "input")


@dataclass(frozen=True, slots=True)
class DetectionRecord:
    """What a table of suspects does not say by itself; its metadata hold it as JSON."""

    target: str
    ranking: str  # the score that ranks
    headline: str
    corpus: str  # fingerprint
    made_from: dict[str, str]
    rows: int
    threshold: Threshold
    detections: dict[str, Detection]  # of each score, where there is a truth
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Suspects(Result):
    """All rows, the most suspicious first.

    Attributes:
        table: rank, row_id, flagged, each score (higher is more suspicious, the last one ranks), and where leaks are
            looked for unit_id (the unit that a row matches best) and exact_copy. Its schema holds `record` as JSON.
        shown: the first rows with their label or unit, and their text.
        scores: by name, (N,), in the order of the artifact's rows.
        agreements: of published methods with the ranking score, by method.
    """

    record: DetectionRecord
    shown: pa.Table
    scores: Mapping[str, F64]
    agreements: Mapping[str, Agreement]

    def _shown(self) -> tuple[list[str], list[list[str]]]:
        rows = [[str(value) for value in row.values()] for row in self.shown.to_pylist()]
        return list(self.shown.column_names), rows


def detect(
    artifact: Artifact,
    target: str,
    *,
    contamination: bool = False,
    label: str | None = None,
    truth: str | None = None,
    clean: str | None = None,
    k: int | None = None,
    neighbours: int | None = None,
    false_positives: float = FALSE_POSITIVES,
    match: str | None = None,
    against: Sequence[AskedMethod] = (),
    cache: Path | None = None,
    top: int = LISTED,
    progress: Progress | None = None,
) -> Suspects:
    """Rank rows by how wrong they look to the trusted units of `target`, or by how much they look like one of them.

    `relevance` is minus the mean relevance to the units, each standardised over the rows. Where rows have a label,
    `geometry` is the share of a row's nearest neighbours in the hidden sketch with another label, and `fused` the mean
    of the two ranks. `contamination` is the largest standardised relevance to a unit: a row that holds a unit's text
    has far more than others. Rows that are a unit to the letter come first there; without `contamination` they are an
    error.

    Args:
        label: column of labels; None: the class of images, of texts none.
        truth: column that says which rows were planted (true or 1): how well each score finds them.
        clean: column that says which rows are known to be right: their scores decide the threshold.
        k: first rows that precision, recall and agreement are of; None: as many as were planted, or flagged.
        neighbours: nearest rows whose labels are compared; None: 10.
        false_positives: share of right rows that the threshold may flag.
        match: relevance kernel; None: token where it is built.
        against: published methods that are compared with `contamination`.
        cache: where their scores are kept; None: in the artifact.
        top: rows in `shown`.
    Raises:
        ArtifactError: no such target, column or kernel; a trusted unit that is itself a row (all listed).
        SettingsError: a number out of range, too few rows, an argument without effect, or a truth in which nothing or
            everything is planted.
    Memory: a few numbers a row, the hidden sketch where there are labels, and a block of relevance.
    """
    label = label or (CLASS_LABEL if not contamination and CLASS_LABEL in _columns(artifact) else None)
    _refuse_idle(
        {
            "with contamination": {"label": contamination and label, "neighbours": contamination and neighbours},
            "without contamination": {"against": not contamination and list(against)},
            "without label": {"neighbours": None if label else neighbours},
            "without against": {"cache": None if against else cache},
            "without truth or against": {"k": None if truth or against else k},
        }
    )
    _check(artifact, neighbours)
    progress = progress or Silent()
    copies = exact_copies(artifact, target)
    columns = artifact.unit_columns(target)
    array = relevance_array(artifact, match)
    sums = over_units(lambda: artifact.array_blocks(array, columns=columns), artifact.n_rows, progress)
    notes = [] if copies.note is None else [copies.note]
    found = _Scores(artifact, target, sums, copies, false_positives, notes)
    if contamination:
        for method in against:
            rows = rows_by_method(artifact, method, cache=cache, progress=progress)
            blocks = _of_method(rows, columns)
            found.scores[method.label] = over_units(blocks, artifact.n_rows, progress).largest_N
        found.look_for_copies()
    else:
        found.look_for_wrong_rows(label, neighbours or NEIGHBOURS, progress)
    return found.result(clean=clean, truth=truth, k=k, top=top, label=None if contamination else label)
