"""Which rows look wrong to a trusted target.

Shape letters: N rows, E units.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from grasp.arrays import F64, Bool
from grasp.artifact.reader import RELEVANCE, ArtifactReader
from grasp.audit.copies import Pair, exact_copies
from grasp.audit.detection import (
    Detection,
    Threshold,
    mean_ranks,
    measure,
    threshold,
    threshold_like,
    threshold_of_checked,
)
from grasp.audit.neighbours import COMPARED, disagreement
from grasp.corpus.labels import CLASS_LABEL
from grasp.errors import ArtifactError, SettingsError
from grasp.extract.progress import Progress, Silent
from grasp.predict.predictor import RowMoments
from grasp.predict.rows import label_column, only_target
from grasp.results import Result
from grasp.text import json_text

RECORD: Final = b"grasp.suspects"
NEIGHBOURS = 10
FALSE_POSITIVES = 0.01
LISTED = 10
LEAST_ROWS = 10  # fewer have no distribution to speak of


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


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Suspects(Result):
    """All rows, the most suspicious first.

    Attributes:
        table: rank, row_id, flagged, and each score (higher is more suspicious, the last one ranks). Its metadata hold
            `record`.
        shown: the first rows with their label, and their text.
        scores: by name, (N,), in the order of the artifact's rows.
    """

    record: DetectionRecord
    shown: pa.Table
    scores: Mapping[str, F64]

    def _shown(self) -> tuple[list[str], list[list[str]]]:
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
    top: int = LISTED,
    false_positives: float = FALSE_POSITIVES,
    clean: str | None = None,
    truth: str | None = None,
    k: int | None = None,
    neighbours: int | None = None,
    match: str | None = None,
    progress: Progress | None = None,
) -> Suspects:
    """Find rows that look wrong to a target you trust.

    Mislabelled, poisoned or misleading rows teach little of what a trusted target asks, and look like rows with
    another label.

    In Python the result has three scores. `relevance` is minus the mean relevance to the units, each standardised over
    the rows. Where rows have a label, `geometry` is the share of a row's nearest neighbours in the hidden sketch with
    another label, and `fused` the mean of the two ranks. A trusted unit that is itself a row is an error.

    Args:
        target: target that is asked about. Default: the only one.
        label: column whose values may be wrong. Default: the class of images, if any.
        top: rows to show.
        false_positives: share of right rows that may be flagged by mistake.
        clean: column that is true for rows checked to be right: they set the threshold.
        truth: column that is true for rows known to be wrong: how many are found?
        k: first rows that are counted. Default: as many as are wrong.
        neighbours: nearest rows whose labels are compared. Default: 10.
        match: one kernel: gradient, token, input, neighbour, shift, tilt or pooled. Default: token, or pooled
            where it is not built.
    Raises:
        ArtifactError: no such target, column or kernel; a trusted unit that is itself a row (all listed).
        SettingsError: a number out of range, too few rows, an argument without effect, or a truth in which nothing or
            everything is planted.
    Memory: a few numbers a row, the hidden sketch where there are labels, and blocks of relevance.
    """
    target = only_target(artifact, target)
    if label is None and CLASS_LABEL in pq.read_schema(artifact.rows_path).names:
        label = CLASS_LABEL
    if k is not None and truth is None:
        raise SettingsError("k: no meaning without truth; leave it out")
    if neighbours is not None and label is None:
        raise SettingsError("neighbours: no meaning without a label; leave it out")
    if neighbours is not None and not 1 <= neighbours < COMPARED:
        raise SettingsError(f"neighbours: got {neighbours}, expected at least 1 and fewer than {COMPARED}")
    if k is not None and not 1 <= k <= artifact.n_rows:
        raise SettingsError(f"k: got {k}, expected 1 to {artifact.n_rows}")
    if artifact.n_rows < LEAST_ROWS:
        raise SettingsError(
            f"{artifact.where}: has {artifact.n_rows} rows, expected at least {LEAST_ROWS}: of fewer none stands out "
            "against the others; build it on more, or read them"
        )
    array = relevance_array(artifact, match)
    right_N = None if clean is None else _yes_or_no(artifact, clean, "clean")
    truth_N = None if truth is None else _yes_or_no(artifact, truth, "truth")
    progress = progress or Silent()
    copies, not_compared = exact_copies(artifact, target)
    if copies:
        raise ArtifactError(
            f"{artifact.where}: {_named(artifact, target, copies)}; take them out of one of the two and build again"
        )
    notes = [] if not_compared is None else [not_compared]
    relevance_N = np.empty(artifact.n_rows)
    for start, score_NE in standardised_blocks(artifact, array, target, progress):
        relevance_N[start : start + len(score_NE)] = -score_NE.mean(axis=1)
    scores = {"relevance": relevance_N}
    if label is not None:
        geometry_N, said = _geometry(artifact, label, neighbours or NEIGHBOURS, progress)
        notes += said
        if geometry_N is not None:
            scores |= {"geometry": geometry_N, "fused": mean_ranks([relevance_N, geometry_N])}
    ranking = list(scores)[-1]
    ranking_N = scores[ranking]
    if right_N is not None:
        try:
            cut = threshold_of_checked(ranking_N, right_N, false_positives)
        except SettingsError as err:
            raise SettingsError(f"clean {clean}: {err}") from err
    else:
        cut = threshold(relevance_N, false_positives)
        if ranking != "relevance":
            cut = threshold_like(ranking_N, cut)
    record = DetectionRecord(
        target=target,
        ranking=ranking,
        headline=_headline(ranking, cut, artifact.n_rows),
        corpus=artifact.manifest.fingerprints.get("corpus", ""),
        made_from=made_from(artifact, target),
        rows=artifact.n_rows,
        threshold=cut,
        detections={} if truth_N is None else {name: measure(score_N, truth_N, k) for name, score_N in scores.items()},
        notes=(*notes, "scores speak against a row: the higher, the more suspicious", *cut.notes),
    )
    order_N = np.argsort(-ranking_N, kind="stable")
    table = pa.table(
        {
            "rank": np.arange(1, artifact.n_rows + 1),
            "row_id": _column(artifact, "row_id").take(pa.array(order_N)),
            "flagged": (ranking_N > cut.value)[order_N],
            **{name: score_N[order_N] for name, score_N in scores.items()},
        }
    )
    return Suspects(
        table.replace_schema_metadata({RECORD: json_text(asdict(record), indent=None)}),
        record.headline,
        record.notes,
        record=record,
        shown=_shown(artifact, table.slice(0, top), order_N[:top], ranking, label, cut.beyond_chance),
        scores=scores,
    )


def _geometry(
    artifact: ArtifactReader, label: str, neighbours: int, progress: Progress
) -> tuple[F64 | None, list[str]]:
    """Disagreement with the neighbours, and what is to be said of it; none where it tells no row from another."""
    column = label_column(artifact, label)
    code_N = column.codes_N.astype(np.int64)
    if None in column.values:  # rows without a label are each alone
        none_N = np.flatnonzero(code_N == column.values.index(None))
        code_N[none_N] = len(column.values) + np.arange(len(none_N))
    _, sketch_ND = next(artifact.array_blocks("hidden_sketch", block_rows=artifact.n_rows))
    found = disagreement(sketch_ND, code_N, neighbours, progress)
    alone = int(found.alone_N.sum())
    if found.share_N.min() == found.share_N.max():
        why = f"every row is alone with its {label}" if alone else f"{label} is the same for all neighbours"
        return None, [f"{why}: geometry says nothing, rows are ranked by relevance alone"]
    notes = [f"{alone} rows are alone with their {label}: geometry says nothing of them"] if alone else []
    if found.found < 1:
        notes.append(
            f"neighbours were looked for among {COMPARED:,} rows of like hidden sketch: {found.found:.0%} of the "
            f"{neighbours} nearest were found"
        )
    return found.share_N, notes


def relevance_array(artifact: ArtifactReader, match: str | None) -> str:
    """Array of a kernel of relevance; None: token where it is built, else pooled."""
    return artifact.relevance_name(match or ("token" if RELEVANCE["token"] in artifact.array_names else "pooled"))


def standardised_blocks(
    artifact: ArtifactReader, array: str, target: str, progress: Progress
) -> Iterator[tuple[int, F64]]:
    """First row and (N, E) of every block: relevance to the units of a target, each standardised over all rows.

    Two passes over blocks: moments of every unit, then its standardised scores. Memory: one block.
    """
    columns, n_rows = artifact.unit_columns(target), artifact.n_rows
    progress.stage(array.replace("_", " "), rows=2 * n_rows, tokens=None)
    moments = RowMoments(0, np.zeros(len(columns)), np.zeros(len(columns)))
    for _, block in artifact.array_blocks(array, columns=columns):
        moments = moments.merge(RowMoments.from_values(block))
        progress.advance(len(block), 0)
    scale_E = moments.spread.inverse_E
    for start, block in artifact.array_blocks(array, columns=columns):
        yield start, (block - moments.mean_E) * scale_E
        progress.advance(len(block), 0)


def _headline(ranking: str, cut: Threshold, n_rows: int) -> str:
    """The answer; flags that are no more than chance expects are no suspects."""
    expected = f"about {cut.expected_false:,.0f} of {n_rows:,} rows"
    if not cut.beyond_chance:
        return f"No suspects by {ranking}: {cut.n_flagged:,} flagged, no more than chance flags ({expected})."
    return f"{cut.n_flagged:,} suspects by {ranking}; chance would flag {expected}."


def _shown(
    artifact: ArtifactReader,
    table: pa.Table,
    order_N: NDArray[np.int64],
    ranking: str,
    label: str | None,
    believed: bool,
) -> pa.Table:
    """Some rows of the table as people read them."""
    rows = artifact.rows(order_N)
    extra = {} if label is None else {label: rows[label]}
    flagged = [("yes" if believed else "by chance?") if flag else "no" for flag in table["flagged"].to_pylist()]
    named = {name: table[name] for name in ("rank", ranking)} | {"flagged": flagged, "row_id": table["row_id"]}
    return pa.table(named | extra | {"text": rows["snippet"]})


def made_from(artifact: ArtifactReader, target: str) -> dict[str, str]:
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


def _named(artifact: ArtifactReader, target: str, copies: Sequence[Pair]) -> str:
    """The copies, the first ten by name."""
    shown = copies[:LISTED]
    names = artifact.rows(np.array([row for _, row in shown], dtype=np.int64))["row_id"].to_pylist()
    units = artifact.units["unit_id"].take(pa.array(artifact.unit_columns(target))).to_pylist()
    listed = ", ".join(f"{units[unit]} = {name}" for (unit, _), name in zip(shown, names, strict=True))
    more = f" and {len(copies) - LISTED} more" if len(copies) > LISTED else ""
    count = len({unit for unit, _ in copies})
    return f"{count} of {len(units)} trusted units of {target} are rows of the corpus: {listed}{more}"


def _column(artifact: ArtifactReader, name: str) -> pa.ChunkedArray:
    """A column of the row table."""
    return pa.chunked_array([batch.column(0) for batch in artifact.row_batches([name])])


def _yes_or_no(artifact: ArtifactReader, name: str, argument: str) -> Bool:
    """A column of true and false, or 1 and 0, in every row."""
    values = _column(artifact, name).to_pylist()
    for i, value in enumerate(values):
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            row = _column(artifact, "row_id")[i].as_py()
            raise SettingsError(
                f"{argument} {name}: row {row} has {'no value' if value is None else repr(value)}, expected true or "
                "false, or 1 or 0, in every row; fill the column in and build again"
            )
    return np.array(values, dtype=np.bool_)
