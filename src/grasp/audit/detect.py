"""Which rows look wrong to a trusted target, and which hold a target's own text.

Shape letters: N rows, E units.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from grasp.artifact.reader import RELEVANCE, ArtifactReader
from grasp.audit.copies import Copies, exact_copies
from grasp.audit.detection import (
    Detection,
    Likeness,
    Threshold,
    likeness,
    mean_ranks,
    measure,
    threshold,
    threshold_like,
    threshold_of_checked,
)
from grasp.audit.neighbours import COMPARED, disagreement
from grasp.corpus.images import CLASS_LABEL
from grasp.errors import ArtifactError, SettingsError
from grasp.extract.progress import Progress, Silent
from grasp.predict.row_arrays import only_target
from grasp.predict.slices import LabelTable
from grasp.predict.standardize import ComponentMoments, RowMoments
from grasp.results import Result
from grasp.runs.methods import MethodRows, configured_methods, method_rows
from grasp.text import json_text

F64 = NDArray[np.float64]
Bool = NDArray[np.bool_]
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
        table: rank, row_id, flagged, each score (higher is more suspicious, the last one ranks), and where leaks are
            looked for unit_id (the unit that a row is most like) and exact_copy. Its metadata hold `record`.
        shown: the first rows with their label or unit, and their text.
        scores: by name, (N,), in the order of the artifact's rows.
        agreements: of published methods with the score that ranks, by method.
    """

    record: DetectionRecord
    shown: pa.Table
    scores: Mapping[str, F64]
    agreements: Mapping[str, Likeness]

    def _shown(self) -> tuple[list[str], list[list[str]]]:
        rows = [
            [f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in self.shown.to_pylist()
        ]
        return list(self.shown.column_names), rows

    def _below(self) -> Sequence[str]:
        return self.notes


@dataclass(frozen=True, slots=True)
class _Scored:
    """Scores of all rows, higher for more suspicious ones."""

    scores: dict[str, F64]
    ranking: str  # the one that ranks
    null_N: F64  # the score that the threshold is fitted to
    copy_N: Bool  # rows that are a unit to the letter: first and flagged, whatever their score
    unit_N: NDArray[np.int64] | None = None  # that a row is most like, counted within the target
    notes: tuple[str, ...] = ()


def detect(
    artifact: ArtifactReader,
    target: str | None = None,
    *,
    contamination: bool = False,
    label: str | None = None,
    truth: str | None = None,
    clean: str | None = None,
    k: int | None = None,
    neighbours: int | None = None,
    false_positives: float = FALSE_POSITIVES,
    match: str | None = None,
    against: str | Sequence[str] = (),
    cache: Path | str | None = None,
    top: int = LISTED,
    progress: Progress | None = None,
) -> Suspects:
    """Rank rows by how wrong they look to the trusted units of a target, or by how much they are like one of them.

    `relevance` is minus the mean relevance to the units, each standardised over the rows. Where rows have a label,
    `geometry` is the share of a row's nearest neighbours in the hidden sketch with another label, and `fused` the mean
    of the two ranks. `contamination` is the largest standardised relevance to a unit: a row that holds a unit's text
    has far more than others. Rows that are a unit to the letter come first there; otherwise they are an error.

    Args:
        target: whose units are trusted; None: the only one.
        label: column of labels; None: the class of images, of texts none.
        truth: column that says which rows were planted (true or 1): how well does each score find them?
        clean: column that says which rows are known to be right: their scores decide the threshold.
        k: first rows that precision, recall and agreement are of; None: as many as were planted, or flagged.
        neighbours: nearest rows whose labels are compared; None: 10.
        false_positives: share of right rows that the threshold may flag.
        match: relevance kernel; None: token where it is built.
        against: published methods, by name, to compare `contamination` with.
        cache: where their scores are kept; None: in the artifact.
        top: rows in `shown`.
    Raises:
        ArtifactError: no such target, column or kernel; a trusted unit that is itself a row (all listed).
        SettingsError: a number out of range, too few rows, an argument without effect, or a truth in which nothing or
            everything is planted.
    Memory: a few numbers a row, the hidden sketch where there are labels, and blocks of relevance.
    """
    target = only_target(artifact, target)
    if not contamination and label is None and CLASS_LABEL in pq.read_schema(artifact.rows_path).names:
        label = CLASS_LABEL
    idle = {
        "label: no meaning with contamination": contamination and label is not None,
        "neighbours: no meaning with contamination": contamination and neighbours is not None,
        "neighbours: no meaning without a label": label is None and neighbours is not None,
        "against: no meaning without contamination; rank by a method with `grasp score`": bool(against)
        and not contamination,
        "cache: no meaning without against": cache is not None and not against,
        "k: no meaning without truth or against": k is not None and truth is None and not against,
    }
    _check(artifact, k, neighbours, idle)
    progress, copies = progress or Silent(), exact_copies(artifact, target)
    if contamination:
        methods = configured_methods(against, where="against") if against else ()
        place = None if cache is None else Path(cache)
        others = [method_rows(artifact, one, cache=place, progress=progress) for one in methods]
        scored = _leaks(artifact, target, match, copies, others, progress)
    else:
        scored = _wrong_rows(artifact, target, match, copies, label, neighbours or NEIGHBOURS, progress)
    cut = _threshold(artifact, scored, clean, false_positives)
    truth_N = None if truth is None else _yes_or_no(artifact, truth, "truth")
    return _result(artifact, target, scored, cut, truth_N, k, label, top)


def _check(artifact: ArtifactReader, k: int | None, neighbours: int | None, idle: Mapping[str, bool]) -> None:
    """Refuse what would have no effect, numbers out of range, and too few rows."""
    if mistake := next((mistake for mistake, is_made in idle.items() if is_made), None):
        raise SettingsError(f"{mistake}; leave it out")
    if neighbours is not None and not 1 <= neighbours < COMPARED:
        raise SettingsError(f"neighbours: got {neighbours}, expected at least 1 and fewer than {COMPARED}")
    if k is not None and not 1 <= k <= artifact.n_rows:
        raise SettingsError(f"k: got {k}, expected 1 to {artifact.n_rows}")
    if artifact.n_rows < LEAST_ROWS:
        raise SettingsError(
            f"{artifact.where}: has {artifact.n_rows} rows, expected at least {LEAST_ROWS}: of fewer none stands out "
            "against the others; build it on more, or read them"
        )


# ------------------------------------------------------------------------------------------------- scores


def _wrong_rows(
    artifact: ArtifactReader,
    target: str,
    match: str | None,
    copies: Copies,
    label: str | None,
    neighbours: int,
    progress: Progress,
) -> _Scored:
    if copies.pairs:
        raise ArtifactError(
            f"{artifact.where}: {_named(artifact, target, copies)}; take them out of one of the two and build again "
            "(for leaked targets ask with contamination)"
        )
    notes = [] if copies.note is None else [copies.note]
    relevance_N = -unit_scores(artifact, target, match, progress).mean_N
    scores = {"relevance": relevance_N}
    if label is not None:
        geometry_N, said = _geometry(artifact, label, neighbours, progress)
        notes += said
        if geometry_N is not None:
            scores |= {"geometry": geometry_N, "fused": mean_ranks([relevance_N, geometry_N])}
    ranking, nobody_N = list(scores)[-1], np.zeros(artifact.n_rows, dtype=np.bool_)
    return _Scored(scores, ranking, relevance_N, nobody_N, notes=tuple(notes))


def _geometry(
    artifact: ArtifactReader, label: str, neighbours: int, progress: Progress
) -> tuple[F64 | None, list[str]]:
    """Disagreement with the neighbours, and what is to be said of it; none where it tells no row from another."""
    column = LabelTable(artifact.rows_path).column(label, "label")
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


def _leaks(
    artifact: ArtifactReader,
    target: str,
    match: str | None,
    copies: Copies,
    others: Sequence[MethodRows],
    progress: Progress,
) -> _Scored:
    scores = {rows.label: unit_scores(rows, target, progress=progress).largest_N for rows in others}
    found = unit_scores(artifact, target, match, progress)
    scores["contamination"] = found.largest_N
    copied_N = copies.best(artifact.n_rows)
    notes = [] if copies.note is None else [copies.note]
    if copies.pairs:
        notes.append(f"{_named(artifact, target, copies)}: exact copies, put first")
    unit_N = np.where(copied_N >= 0, copied_N, found.unit_N)
    return _Scored(scores, "contamination", found.largest_N, copied_N >= 0, unit_N, tuple(notes))


@dataclass(frozen=True, slots=True)
class UnitScores:
    """Scores of rows for the units of a target, each unit standardised over the rows, brought together row by row."""

    mean_N: F64
    largest_N: F64
    unit_N: NDArray[np.int64]  # of the largest, counted within the target


def unit_scores(
    rows: ArtifactReader | MethodRows, target: str, match: str | None = None, progress: Progress | None = None
) -> UnitScores:
    """Relevance of all rows to the units of a target, or scores of a published method.

    Two passes over blocks: moments of every unit, then its standardised scores. Memory: one block.

    Args:
        match: kernel of an artifact; None: token where it is built, else pooled.
    """
    if isinstance(rows, MethodRows):
        name = rows.array_names[0]
    else:
        name = rows.relevance_name(match or ("token" if RELEVANCE["token"] in rows.array_names else "pooled"))
    columns, n_rows, progress = rows.unit_columns(target), rows.n_rows, progress or Silent()
    progress.stage(name.replace("_", " "), rows=2 * n_rows, tokens=None)
    moments = RowMoments(0, np.zeros(len(columns)), np.zeros(len(columns)))
    for _, block in rows.array_blocks(name, columns=columns):
        moments = moments.merge(RowMoments.of(block))
        progress.advance(len(block), 0)
    scale_E = ComponentMoments(moments.mean_E, np.sqrt(moments.scatter_E / n_rows)).inverse_E
    found = UnitScores(np.empty(n_rows), np.empty(n_rows), np.empty(n_rows, dtype=np.int64))
    for start, block in rows.array_blocks(name, columns=columns):
        score_NE, here = (block - moments.mean_E) * scale_E, slice(start, start + len(block))
        found.mean_N[here], found.largest_N[here] = score_NE.mean(axis=1), score_NE.max(axis=1)
        found.unit_N[here] = score_NE.argmax(axis=1)
        progress.advance(len(block), 0)
    return found


# ------------------------------------------------------------------------------------- threshold and result


def _threshold(artifact: ArtifactReader, scored: _Scored, clean: str | None, rate: float) -> Threshold:
    """By the rows known to be right, else by the null distribution of a score, copies left out."""
    ranking_N, copy_N = scored.scores[scored.ranking], scored.copy_N
    if clean is not None:
        try:
            return threshold_of_checked(ranking_N, _yes_or_no(artifact, clean, "clean"), rate)
        except SettingsError as err:
            raise SettingsError(f"clean {clean}: {err}") from err
    enough = (~copy_N).sum() >= LEAST_ROWS
    cut = threshold(scored.null_N[~copy_N] if enough else scored.null_N, rate)
    return cut if ranking_N is scored.null_N else threshold_like(ranking_N, cut)


def _result(
    artifact: ArtifactReader,
    target: str,
    scored: _Scored,
    cut: Threshold,
    truth_N: Bool | None,
    k: int | None,
    label: str | None,
    top: int,
) -> Suspects:
    scores, copy_N, ranking_N = scored.scores, scored.copy_N, scored.scores[scored.ranking]
    flagged_N = copy_N | (ranking_N > cut.value)
    cut = replace(cut, n_flagged=int(flagged_N.sum()), n_copies=int(copy_N.sum()))
    detections = {}
    if truth_N is not None:
        ranked = scores | {scored.ranking: np.where(copy_N, ranking_N + np.ptp(ranking_N) + 1, ranking_N)}
        detections = {name: measure(score_N, truth_N, k) for name, score_N in ranked.items()}
    first = k or max(cut.n_flagged, min(LISTED, artifact.n_rows))
    others = [] if scored.unit_N is None else list(scores)[:-1]
    record = DetectionRecord(
        target=target,
        ranking=scored.ranking,
        headline=_headline(scored.ranking, cut, artifact.n_rows),
        corpus=artifact.manifest.fingerprints.get("corpus", ""),
        made_from=made_from(artifact, target),
        rows=artifact.n_rows,
        threshold=cut,
        detections=detections,
        notes=(*scored.notes, "scores speak against a row: the higher, the more suspicious", *cut.notes),
    )
    order_N = np.lexsort((-ranking_N, ~copy_N))
    table = _table(artifact, target, scored, flagged_N, order_N)
    return Suspects(
        table.replace_schema_metadata({RECORD: json_text(asdict(record), indent=None)}),
        record.headline,
        record.notes,
        record=record,
        shown=_shown(artifact, table.slice(0, top), order_N[:top], scored.ranking, label, cut.beyond_chance),
        scores=scores,
        agreements={name: likeness(scores[name], ranking_N, first) for name in others},
    )


def _headline(ranking: str, cut: Threshold, n_rows: int) -> str:
    """The answer; flags that are no more than chance expects are no suspects."""
    by_score, expected = cut.n_flagged - cut.n_copies, f"about {cut.expected_false:,.0f} of {n_rows:,} rows"
    copies = f"{cut.n_copies:,} rows are exact copies of units. " if cut.n_copies else ""
    if not cut.beyond_chance:
        return f"{copies}No suspects by {ranking}: {by_score:,} flagged, no more than chance flags ({expected})."
    return f"{copies}{by_score:,} suspects by {ranking}; chance would flag {expected}."


def _table(
    artifact: ArtifactReader, target: str, scored: _Scored, flagged_N: Bool, order_N: NDArray[np.int64]
) -> pa.Table:
    """Every row, the most suspicious first."""
    columns: dict[str, Any] = {
        "rank": np.arange(1, len(order_N) + 1),
        "row_id": _column(artifact, "row_id").take(pa.array(order_N)),
        "flagged": flagged_N[order_N],
        **{name: score_N[order_N] for name, score_N in scored.scores.items()},
    }
    if scored.unit_N is not None:
        units = artifact.units["unit_id"].take(pa.array(artifact.unit_columns(target)))
        columns["unit_id"] = units.take(pa.array(scored.unit_N[order_N]))
        columns["exact_copy"] = scored.copy_N[order_N]
    return pa.table(columns)


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
    extra = {"unit_id": table["unit_id"]} if "unit_id" in table.column_names else {}
    if label is not None:
        extra[label] = rows[label]
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


def _named(artifact: ArtifactReader, target: str, copies: Copies) -> str:
    """The copies, the first ten by name."""
    shown = copies.pairs[:LISTED]
    names = artifact.rows(np.array([row for _, row in shown], dtype=np.int64))["row_id"].to_pylist()
    units = artifact.units["unit_id"].take(pa.array(artifact.unit_columns(target))).to_pylist()
    listed = ", ".join(f"{units[unit]} = {name}" for (unit, _), name in zip(shown, names, strict=True))
    more = f" and {len(copies.pairs) - LISTED} more" if len(copies.pairs) > LISTED else ""
    count = len({unit for unit, _ in copies.pairs})
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
