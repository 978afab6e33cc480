"""Detect rows that look mislabelled, poisoned or misleading to a trusted target. Start with `detect`.

A unit is a scored element of a target, such as a question with its answer or a trusted image; relevance is the
predicted decrease of a unit's loss from training on a row. The statistics of thresholds and of the evaluation are in
`grasp.inspect.detection`.

Shape letters: N rows, E units.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter, ValidationError

from grasp.arrays import F64, Bool
from grasp.artifact.label_table import LabelColumn
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import index_by_row_id, label_column, only_target
from grasp.corpus.labels import CLASS_LABEL, HASH_LABEL
from grasp.errors import ArtifactError, SettingsError
from grasp.inspect.copies import column_values, exact_copies
from grasp.inspect.detection import (
    Detection,
    Threshold,
    conformal_threshold,
    estimate_threshold,
    evaluate_scores,
    matching_threshold,
    mean_ranks,
)
from grasp.inspect.neighbours import MAX_CANDIDATES, disagreement
from grasp.moments import StreamingMoments
from grasp.pipeline.modality import vision
from grasp.pipeline.provenance import BuildSource
from grasp.progress import Progress, Silent
from grasp.results import Result
from grasp.store.checksummed_parquet import read_checksummed_batches
from grasp.store.contents import readable_table
from grasp.text import json_text
from grasp.yaml_files import describe

RECORD: Final = b"grasp.suspects"  # key of the `DetectionRecord` in the metadata of the Parquet table
CHANCE_AUROC: Final = 0.5  # AUROC of a score without information
DEFAULT_NEIGHBOURS = 10
FALSE_POSITIVES = 0.01  # default share of correct rows that may be flagged
DEFAULT_TOP = 10
MIN_ROWS = 10  # fewer rows have no meaningful distribution
REPORT_ROWS = 12  # rows shown in a report
PICTURE_PIXELS = 160  # pixels of the longer side of an image


@dataclass(frozen=True, slots=True)
class DetectionRecord:
    """Record of a detection, stored as JSON in the metadata of the table of suspects."""

    target: str
    ranking: str  # the score by which rows are ranked
    headline: str
    corpus: str  # fingerprint
    source_hashes: dict[str, str]
    rows: int
    threshold: Threshold
    detections: dict[str, Detection]  # by score, if there is a ground truth
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Suspects(Result):
    """All rows, the most suspicious first.

    Attributes:
        table: rank, row_id, flagged, and the scores (higher is more suspicious; rows are ranked by the last one). Its
            metadata contain `record`.
        shown: the first rows with label and text.
        scores: scores by name, (N,), in the order of the artifact's rows.
    """

    record: DetectionRecord
    shown: pa.Table
    scores: Mapping[str, F64]

    def _printed_cells(self) -> tuple[list[str], list[list[str]]]:
        rows = [
            [f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in self.shown.to_pylist()
        ]
        return list(self.shown.column_names), rows

    def _below(self) -> Sequence[str]:
        return self.notes


def detect(
    artifact: ArtifactReader,
    target: str | None = None,
    *,
    label: str | None = None,
    top: int = DEFAULT_TOP,
    false_positives: float = FALSE_POSITIVES,
    clean: str | None = None,
    truth: str | None = None,
    k: int | None = None,
    neighbours: int | None = None,
    match: str | None = None,
    progress: Progress | None = None,
) -> Suspects:
    """Find rows that look wrong to a trusted target.

    Mislabelled, poisoned or misleading rows have low relevance to a trusted target, and resemble rows with another
    label.

    In Python the result has up to three scores. `low_relevance` is minus the mean relevance to the units, each
    standardised over the rows. If rows have a label, `neighbour_disagreement` is the share of a row's nearest
    neighbours in the hidden sketch with another label, and `fused` the mean of the two ranks. A trusted unit that is
    also a row is an error.

    Args:
        artifact: artifact of the corpus and the trusted target.
        target: trusted target. Default: the only one.
        label: column whose values may be wrong. Default: the class of images, if any.
        top: rows to show.
        false_positives: share of correct rows that may be flagged.
        clean: column that is true for rows verified to be correct, which determine the threshold.
        truth: column that is true for rows known to be wrong, to evaluate the scores.
        k: number of first rows for precision and recall. Default: the number of wrong rows.
        neighbours: number of nearest rows whose labels are compared. Default: 10.
        match: one kernel, e.g. gradient or output_layer. Default: output_layer if it was built, else the first kernel.
        progress: receives stages and numbers of rows.
    Raises:
        ArtifactError: no such target, column or kernel, or a trusted unit is also a row.
        SettingsError: a number out of range, too few rows, an argument without effect, or a truth in which no row or
            every row is wrong.
    Memory: a few numbers per row, the hidden sketch if there are labels, and a block of relevance.
    """
    target = only_target(artifact, target)
    if label is None and CLASS_LABEL in pq.read_schema(artifact.rows_path).names:
        label = CLASS_LABEL
    _check_numbers(artifact, label, top, truth, k, neighbours)
    array = relevance_array(artifact, match)
    correct_N = None if clean is None else _boolean_column(artifact, clean, "clean")
    wrong_N = None if truth is None else _boolean_column(artifact, truth, "truth")
    progress = progress or Silent()
    copy_notes = _refuse_copies(artifact, target)
    low_relevance_N = np.empty(artifact.n_rows)
    for start, score_NE in standardised_blocks(artifact, array, target, progress):
        low_relevance_N[start : start + len(score_NE)] = -score_NE.mean(axis=1)
    scores = {"low_relevance": low_relevance_N}
    label_notes: list[str] = []
    if label is not None:
        column = label_column(artifact, label)
        label = column.name  # as spelled in the corpus
        label_scores, label_notes = _label_scores(
            artifact, column, low_relevance_N, neighbours or DEFAULT_NEIGHBOURS, progress
        )
        scores |= label_scores
    ranking, ranking_N = list(scores.items())[-1]  # `fused` if there are labels, else `low_relevance`
    if correct_N is not None:
        try:
            threshold = conformal_threshold(ranking_N, correct_N, false_positives)
        except SettingsError as err:
            raise SettingsError(f"clean {clean}: {err}") from err
    else:
        # Ranks have no null distribution: the threshold of `low_relevance` determines how many rows are flagged.
        threshold = estimate_threshold(low_relevance_N, false_positives)
        if ranking != "low_relevance":
            threshold = matching_threshold(ranking_N, threshold)
    detections: dict[str, Detection] = {}
    if wrong_N is not None:
        detections = {name: evaluate_scores(score_N, wrong_N, k) for name, score_N in scores.items()}
    record = DetectionRecord(
        target=target,
        ranking=ranking,
        headline=_headline(ranking, threshold, artifact.n_rows),
        corpus=artifact.manifest.fingerprints.get("corpus", ""),
        source_hashes=source_hashes(artifact, target),
        rows=artifact.n_rows,
        threshold=threshold,
        detections=detections,
        notes=(
            *_inverted_score_notes(detections, target),
            *copy_notes,
            *label_notes,
            "higher scores are more suspicious",
            f"low_relevance: minus the relevance of kernel {array.removeprefix('relevance_')}, without the protocol; "
            "--match selects another kernel",
            *threshold.notes,
        ),
    )
    return _rank_rows(artifact, record, scores, label, top)


def _check_numbers(
    artifact: ArtifactReader, label: str | None, top: int, truth: str | None, k: int | None, neighbours: int | None
) -> None:
    """Check the numbers that the user passed, that each has an effect, and that there are enough rows."""
    if top < 0:
        raise SettingsError(f"top: got {top}, expected 0 or more")
    if k is not None and truth is None:
        raise SettingsError("k: requires truth")
    if neighbours is not None and label is None:
        raise SettingsError("neighbours: requires a label")
    if neighbours is not None and not 1 <= neighbours < MAX_CANDIDATES:
        raise SettingsError(f"neighbours: got {neighbours}, expected at least 1 and fewer than {MAX_CANDIDATES}")
    if k is not None and not 1 <= k <= artifact.n_rows:
        raise SettingsError(f"k: got {k}, expected 1 to {artifact.n_rows}")
    if artifact.n_rows < MIN_ROWS:
        raise SettingsError(
            f"{artifact.location}: has {artifact.n_rows} rows, expected at least {MIN_ROWS}; read them "
            "instead, or build the artifact on more rows"
        )


def _headline(ranking: str, threshold: Threshold, n_rows: int) -> str:
    """Return the number of flagged rows, and that expected if all rows are correct, as a sentence."""
    expected_count = f"about {threshold.expected_false:,.0f} of {n_rows:,} rows"
    if threshold.beyond_chance:
        return f"{threshold.n_flagged:,} suspects by {ranking}; expected by chance: {expected_count}."
    return (
        f"No suspects by {ranking}: {threshold.n_flagged:,} flagged, not significantly more than expected by "
        f"chance ({expected_count})."
    )


def _inverted_score_notes(detections: Mapping[str, Detection], target: str) -> list[str]:
    """Return a note for every score by which planted rows are significantly less suspicious than the others."""
    texts = {"low_relevance": f"planted rows look more helpful to {target} than the others"}
    return [
        f"{name}: {texts.get(name, 'planted rows look less suspicious than the others')} (AUROC below 0.5)"
        for name, detection in detections.items()
        if detection.auroc_high < CHANCE_AUROC
    ]


def _refuse_copies(artifact: ArtifactReader, target: str) -> list[str]:
    """Raise an error if trusted units are rows of the corpus; return a note if not all could be compared."""
    copies, note = exact_copies(artifact, target)
    if copies:
        first_rows = np.array([row for _, row in copies[:DEFAULT_TOP]], dtype=np.int64)
        names = artifact.rows(first_rows)["row_id"].to_pylist()
        units = artifact.units["unit_id"].take(pa.array(artifact.unit_columns(target))).to_pylist()
        listed = ", ".join(f"{units[unit]} = {name}" for (unit, _), name in zip(copies, names, strict=False))
        more = f" and {len(copies) - DEFAULT_TOP} more" if len(copies) > DEFAULT_TOP else ""
        raise ArtifactError(
            f"{artifact.location}: {len({unit for unit, _ in copies})} of {len(units)} trusted units of {target} are "
            f"rows of the corpus: {listed}{more}; remove them from one of the two and rebuild"
        )
    return [] if note is None else [note]


def _label_scores(
    artifact: ArtifactReader, column: LabelColumn, low_relevance_N: F64, k_nearest: int, progress: Progress
) -> tuple[dict[str, F64], list[str]]:
    """Return the scores `neighbour_disagreement` and `fused`, or none if the former is constant; and notes."""
    code_N, label = column.codes_N.astype(np.int64), column.name
    if None in column.values:  # each row without a label gets a label of its own
        unlabelled_N = np.flatnonzero(code_N == column.values.index(None))
        code_N[unlabelled_N] = len(column.values) + np.arange(len(unlabelled_N))
    _, sketch_ND = next(artifact.array_blocks("hidden_sketch", block_rows=artifact.n_rows))
    disagreements = disagreement(sketch_ND, code_N, k_nearest, progress)
    n_singletons = int(disagreements.is_singleton_N.sum())
    if disagreements.share_N.min() == disagreements.share_N.max():
        reason = f"every row has a unique {label}" if n_singletons else f"{label} is the same for all neighbours"
        return {}, [f"{reason}: rows are ranked by low_relevance alone"]
    notes = [f"{n_singletons} rows have a unique {label}: their disagreement is the median"] if n_singletons else []
    if disagreements.recall < 1:
        notes.append(
            f"neighbours were searched for among {MAX_CANDIDATES:,} rows with similar hidden sketches: "
            f"{disagreements.recall:.0%} of the {k_nearest} nearest were found"
        )
    return {
        "neighbour_disagreement": disagreements.share_N,
        "fused": mean_ranks([low_relevance_N, disagreements.share_N]),
    }, notes


def _rank_rows(
    artifact: ArtifactReader, record: DetectionRecord, scores: Mapping[str, F64], label: str | None, top: int
) -> Suspects:
    """Return all rows ranked by the last score, and the first `top` for display."""
    threshold, ranking_N = record.threshold, scores[record.ranking]
    order_N = np.argsort(-ranking_N, kind="stable")
    row_ids = pa.chunked_array([batch.column(0) for batch in artifact.row_batches(["row_id"])])
    table = pa.table(
        {
            "rank": np.arange(1, artifact.n_rows + 1),
            "row_id": row_ids.take(pa.array(order_N)),
            "flagged": (ranking_N > threshold.value)[order_N],
            **{name: score_N[order_N] for name, score_N in scores.items()},
        }
    )
    head, rows = table.slice(0, top), artifact.rows(order_N[:top])
    flagged = "yes" if threshold.beyond_chance else "not significant"
    shown = {name: head[name] for name in ("rank", record.ranking)}
    shown |= {
        "flagged": [flagged if is_flagged else "no" for is_flagged in head["flagged"].to_pylist()],
        "row_id": head["row_id"],
    }
    shown |= {} if label is None else {label: rows[label]}
    return Suspects(
        table.replace_schema_metadata({RECORD: json_text(asdict(record), indent=None)}),
        record.headline,
        record.notes,
        record=record,
        shown=pa.table(shown | {"text": rows["snippet"]}),
        scores=scores,
    )


def relevance_array(artifact: ArtifactReader, match: str | None) -> str:
    """Return the relevance array of a kernel. Default: output_layer if it was built, else the first kernel."""
    default = "output_layer" if "output_layer" in artifact.kernels else artifact.kernels[0]
    return artifact.relevance_name(match or default)


def standardised_blocks(
    artifact: ArtifactReader, array: str, target: str, progress: Progress
) -> Iterator[tuple[int, F64]]:
    """Yield the first row of each block, and relevance to the units of a target, (n, E), standardised over all rows.

    Two passes over the blocks: moments of every unit, then standardised scores. Memory: one block.
    """
    columns, n_rows = artifact.unit_columns(target), artifact.n_rows
    name = array.replace("_", " ")
    progress.stage(f"moments of {name}", rows=n_rows, tokens=None)
    moments = StreamingMoments()
    for _, block in artifact.array_blocks(array, columns=columns):
        moments.add(block)
        progress.advance(len(block), 0)
    scale_E = moments.mean_std.inverse_std_C
    progress.stage(name, rows=n_rows, tokens=None)
    for start, block in artifact.array_blocks(array, columns=columns):
        yield start, (block - moments.mean_C) * scale_E
        progress.advance(len(block), 0)


def source_hashes(artifact: ArtifactReader, target: str) -> dict[str, str]:
    """Return hashes of all inputs of the scores: corpus, model, features, and units of the target."""
    digest = hashlib.blake2b(digest_size=16)
    for unit in artifact.units.select(["target", "unit_id", "prompt", "completion"]).to_pylist():
        if unit["target"] == target:
            digest.update(repr(tuple(unit.values())).encode())
    features = json.dumps(artifact.feature_settings, sort_keys=True, default=str).encode()
    fingerprints = {name: artifact.manifest.fingerprints.get(name, "") for name in ("corpus", "model")}
    return fingerprints | {
        "features": hashlib.blake2b(features, digest_size=8).hexdigest(),
        f"units of {target}": digest.hexdigest() if target in artifact.targets else "none",
    }


# ------------------------------------------------------------- reading the output of `grasp detect --out`


@dataclass(frozen=True, slots=True)
class ShownSuspects:
    """A detection with its first rows: lines of its table and of the row table, names of labels, and PNG images."""

    record: DetectionRecord
    lines: tuple[Mapping[str, Any], ...]
    rows: tuple[Mapping[str, Any], ...]
    labels: tuple[str, ...]
    pictures: tuple[bytes | None, ...]  # None: rows are texts, or images are not stored


def read_suspects(path: Path, artifact: ArtifactReader, labels: Sequence[str]) -> ShownSuspects:
    """Read the first rows of a table that `grasp detect --out` wrote, and check that it is of this artifact.

    Args:
        path: table of suspects.
        artifact: artifact that the table must belong to.
        labels: label columns to show.
    Raises:
        SettingsError: not such a table, or it is of another artifact.
    """
    expected = "a .parquet file of grasp detect --out"
    with readable_table(f"--detect: {path}", SettingsError, expected):
        metadata = (pq.read_schema(path).metadata or {}).get(RECORD)
        first_rows = None
        for batch in read_checksummed_batches(path):  # read to the end, so that all digests are verified
            first_rows = batch.slice(0, REPORT_ROWS) if first_rows is None else first_rows
    if metadata is None or first_rows is None or not {"rank", "row_id", "flagged"} <= set(first_rows.schema.names):
        raise SettingsError(f"--detect: {path}: not a result of grasp detect; expected {expected}")
    try:
        record = TypeAdapter(DetectionRecord).validate_json(metadata)
    except ValidationError as err:
        raise SettingsError(f"{describe(err, f'--detect: {path}')}; expected {expected}") from err
    expected_source = source_hashes(artifact, record.target) | {"rows": str(artifact.n_rows)}
    recorded_source = record.source_hashes | {"rows": str(record.rows)}
    if different := [name for name in expected_source if expected_source[name] != recorded_source.get(name)]:
        listed = ", ".join(
            f"{name} {recorded_source.get(name)!r}, here {expected_source[name]!r}" for name in different
        )
        raise SettingsError(f"--detect: {path} is from another artifact: {listed}; run grasp detect on this one")
    lines = first_rows.to_pylist()
    position_of = index_by_row_id(artifact, [line["row_id"] for line in lines])
    if unknown := [line["row_id"] for line in lines if line["row_id"] not in position_of]:
        raise SettingsError(f"--detect: {path}: {unknown[0]!r} is not a row of the artifact; run grasp detect on it")
    index = np.array([position_of[line["row_id"]] for line in lines], dtype=np.int64)
    pictures: Sequence[bytes | None] = [None] * len(index)
    if BuildSource(artifact).has_images:
        pictures = vision().row_pictures(artifact, index, PICTURE_PIXELS)
    return ShownSuspects(
        record,
        tuple(lines),
        tuple(artifact.rows(index).to_pylist()),
        tuple(label for label in labels if label != HASH_LABEL),
        tuple(pictures),
    )


# --------------------------------------------------------------------------------- columns of the row table


def _boolean_column(artifact: ArtifactReader, name: str, argument: str) -> Bool:
    """Read a column of true and false, or 1 and 0; `argument` names the option, for messages."""
    values = list(column_values(artifact, name))
    for i, value in enumerate(values):
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            row = artifact.rows(np.array([i]))["row_id"][0].as_py()
            raise SettingsError(
                f"{argument} {name}: row {row} has {'no value' if value is None else repr(value)}, expected true or "
                "false, or 1 or 0, in every row; complete the column and rebuild"
            )
    return np.array(values, dtype=np.bool_)
