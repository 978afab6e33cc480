"""Which rows look wrong to a trusted target set, and which hold a target's own text.

Shape letters: N rows, E units, D sketch width.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from grasp.artifact.reader import RELEVANCE, Artifact
from grasp.audit.copies import Copies, exact_copies
from grasp.audit.detection import (
    Detection,
    Threshold,
    disagreement,
    fused,
    measure,
    threshold,
    threshold_like,
    threshold_of_checked,
)
from grasp.audit.suspects import SAID, made_from
from grasp.errors import ArtifactError, SettingsError
from grasp.files import written_aside

if TYPE_CHECKING:
    from grasp.audit.ranking import MethodRows

F64 = NDArray[np.float64]
NEIGHBOURS = 10
FALSE_POSITIVE_RATE = 0.01
CLASS_LABEL = "image_class"
LISTED = 10
LEAST_ROWS = 10  # fewer have no distribution to speak of
KERNELS = ("token", "pooled", "input")


@dataclass(frozen=True, slots=True)
class Suspects:
    """Scores of all rows, higher for more suspicious ones, and what is known of them."""

    scores: Mapping[str, F64]  # by name; the last one ranks
    match_E: NDArray[np.int64] | None  # unit that a row matches best, for contamination
    copy_N: NDArray[np.bool_]  # rows that are a unit to the letter: first and flagged, whatever their score
    threshold: Threshold
    detections: Mapping[str, Detection]  # of each score, where there is a truth
    notes: tuple[str, ...]

    @property
    def ranking(self) -> str:
        return list(self.scores)[-1]

    @property
    def order_N(self) -> NDArray[np.int64]:  # noqa: N802 - a shape suffix
        """Rows, the most suspicious first."""
        return np.lexsort((-self.scores[self.ranking], ~self.copy_N))

    @property
    def flagged_N(self) -> NDArray[np.bool_]:  # noqa: N802 - a shape suffix
        return np.asarray(self.copy_N | (self.scores[self.ranking] > self.threshold.value))


def detect(
    artifact: Artifact,
    target: str,
    *,
    label: str | None = None,
    truth: str | None = None,
    clean: str | None = None,
    k: int | None = None,
    neighbours: int = NEIGHBOURS,
    match: str | None = None,
    false_positive_rate: float = FALSE_POSITIVE_RATE,
) -> Suspects:
    """Rank rows by how wrong they look to the trusted units of `target`.

    `relevance` is minus the mean relevance to the units, each standardised over the rows; `geometry`, where rows have
    a label, is the share of a row's nearest neighbours in the hidden sketch with another label; `fused` the mean of
    their ranks. Without `clean` the null distribution is that of the relevance, and the fused score flags as many rows.

    Args:
        label: column of labels; None: the class of images, of texts none.
        truth: column that says which rows were planted (true or 1).
        clean: column that says which rows are known to be right: the null distribution of the ranking score.
        k: rows to look at in the precision and recall; None: as many as were planted.
        match: relevance kernel; None: token where it is built.
    Raises:
        ArtifactError: no such target, column or kernel; a trusted unit that is itself a row (all listed).
        SettingsError: a number out of range, too few rows, or a truth in which nothing or everything is planted.
    """
    if neighbours < 1:
        raise SettingsError(f"neighbours: got {neighbours}, expected at least 1")
    _require_rows(artifact)
    copies = exact_copies(artifact, target)
    _refuse_overlap(artifact, target, copies)
    notes = [] if copies.note is None else [copies.note]
    scores: dict[str, F64] = {"relevance": -standardised(artifact, target, match).mean(axis=1)}
    label = label or (CLASS_LABEL if CLASS_LABEL in _columns(artifact) else None)
    if label is not None:
        score_N, said = _geometry(artifact, label, neighbours)
        notes += said
        if score_N is not None:
            scores |= {"geometry": score_N, "fused": fused([scores["relevance"], score_N])}
    copy_N = np.zeros(artifact.n_rows, dtype=np.bool_)
    cut = _threshold(artifact, scores, "relevance", copy_N, clean, false_positive_rate)
    return _suspects(artifact, scores, None, copy_N, cut, truth, k, notes)


def _geometry(artifact: Artifact, label: str, neighbours: int) -> tuple[F64 | None, list[str]]:
    """Disagreement with the neighbours, and what is to be said of it; none where it tells no row from another."""
    score_N, alone_N = disagreement(_all(artifact, "hidden_sketch"), _codes(column(artifact, label)), neighbours)
    alone = int(alone_N.sum())
    if score_N.min() == score_N.max():
        why = f"every row is alone with its {label}" if alone else f"{label} is the same for all neighbours"
        return None, [f"{why}: geometry says nothing, rows are ranked by relevance alone"]
    return score_N, [f"{alone} rows are alone with their {label}: geometry says nothing of them"] if alone else []


def contamination(
    artifact: Artifact,
    target: str,
    *,
    truth: str | None = None,
    clean: str | None = None,
    k: int | None = None,
    match: str | None = None,
    false_positive_rate: float = FALSE_POSITIVE_RATE,
    others: Mapping[str, F64] | None = None,
) -> Suspects:
    """Rank rows by how much they look like a unit of `target`: the largest standardised relevance over its units.

    A row that holds a unit's text has relevance to that unit far beyond what other rows have. Rows that are a unit to
    the letter come first and are flagged, whatever their relevance.

    Args:
        others: scores of other methods, (N, E of the target) each, compared in the same way.
    Raises:
        ArtifactError, SettingsError: as `detect`, but for overlap, which is what is looked for.
    """
    _require_rows(artifact)
    copies = exact_copies(artifact, target)
    relevance_NE = standardised(artifact, target, match)
    scores = {name: _over_rows(score_NE).max(axis=1) for name, score_NE in (others or {}).items()}
    scores["contamination"] = relevance_NE.max(axis=1)
    copied_N = copies.best(artifact.n_rows)
    best_N = np.where(copied_N >= 0, copied_N, relevance_NE.argmax(axis=1))
    notes = [] if copies.note is None else [copies.note]
    if copies.pairs:
        notes.append(f"{_named(artifact, target, copies)}: exact copies, put first")
    cut = _threshold(artifact, scores, "contamination", copied_N >= 0, clean, false_positive_rate)
    return _suspects(artifact, scores, best_N, copied_N >= 0, cut, truth, k, notes)


def _require_rows(artifact: Artifact) -> None:
    if artifact.n_rows < LEAST_ROWS:
        raise SettingsError(
            f"{artifact.where}: has {artifact.n_rows} rows, expected at least {LEAST_ROWS}: of fewer none stands out "
            "against the others; build it on more, or read them"
        )


def _threshold(
    artifact: Artifact,
    scores: Mapping[str, F64],
    of: str,
    copy_N: NDArray[np.bool_],
    clean: str | None,
    rate: float,
) -> Threshold:
    """By the rows known to be right, else by the null distribution of the score `of`, copies left out."""
    ranking_N = list(scores.values())[-1]
    if clean is None:
        enough = (~copy_N).sum() >= LEAST_ROWS
        cut = threshold(scores[of][~copy_N] if enough else scores[of], rate)
        return cut if ranking_N is scores[of] else threshold_like(ranking_N, cut)
    try:
        return threshold_of_checked(ranking_N, _yes_or_no(artifact, clean, "--clean"), rate)
    except SettingsError as err:
        raise SettingsError(f"--clean {clean}: {err}") from err


def _suspects(
    artifact: Artifact,
    scores: Mapping[str, F64],
    best_N: NDArray[np.int64] | None,
    copy_N: NDArray[np.bool_],
    cut: Threshold,
    truth: str | None,
    k: int | None,
    notes: list[str],
) -> Suspects:
    ranking, ranking_N = list(scores.items())[-1]
    detections: dict[str, Detection] = {}
    if truth is not None:
        planted_N = _yes_or_no(artifact, truth, "--truth")
        ranked = dict(scores) | {ranking: np.where(copy_N, ranking_N + np.ptp(ranking_N) + 1, ranking_N)}
        detections = {name: measure(score_N, planted_N, k) for name, score_N in ranked.items()}
    if cut.all_alike:
        notes = [*notes, "most rows have one and the same score: the threshold says nothing"]
    found = Suspects(scores, best_N, copy_N, cut, detections, tuple(notes))
    return replace(found, threshold=replace(cut, n_flagged=int(found.flagged_N.sum())))


def _refuse_overlap(artifact: Artifact, target: str, copies: Copies) -> None:
    if copies.pairs:
        raise ArtifactError(
            f"{artifact.where}: {_named(artifact, target, copies)}; take them out of one of the two and build again "
            "(for leaked targets: --contamination)"
        )


def _named(artifact: Artifact, target: str, copies: Copies) -> str:
    """The copies, the first ten by name."""
    names = column(artifact, "row_id")
    units = artifact.units.take(pa.array(artifact.unit_columns(target)))["unit_id"].to_pylist()
    listed = ", ".join(f"{units[unit]} = {names[row]}" for unit, row in copies.pairs[:LISTED])
    more = f" and {len(copies.pairs) - LISTED} more" if len(copies.pairs) > LISTED else ""
    count = len({unit for unit, _ in copies.pairs})
    return f"{count} of {len(units)} trusted units of {target} are rows of the corpus: {listed}{more}"


def standardised(artifact: Artifact, target: str, match: str | None = None) -> F64:
    """Relevance of all rows to the units of a target, (N, E), every unit with mean 0 and deviation 1 over the rows."""
    built = [kernel for kernel in KERNELS if RELEVANCE[kernel] in artifact.array_names]
    name = artifact.relevance_name(match or built[0])
    return _over_rows(_all(artifact, name, artifact.unit_columns(target)))


def method_scores(rows: "MethodRows", target: str) -> F64:
    """Scores of a published method for the units of a target, (N, E), to be compared with `contamination`."""
    name = rows.array_names[0]
    return np.concatenate([block for _, block in rows.array_blocks(name, columns=rows.unit_columns(target))])


def _over_rows(score_NE: NDArray[np.floating[Any]]) -> F64:
    score_NE = np.asarray(score_NE, np.float64)
    spread_E = score_NE.std(axis=0)
    return np.asarray((score_NE - score_NE.mean(axis=0)) / np.where(spread_E > 0, spread_E, 1.0))


def _all(artifact: Artifact, name: str, columns: NDArray[np.int64] | None = None) -> NDArray[np.float32]:
    return np.concatenate([block for _, block in artifact.array_blocks(name, columns=columns)])


def _columns(artifact: Artifact) -> list[str]:
    return list(pq.read_schema(artifact.rows_path).names)


def column(artifact: Artifact, name: str) -> list[Any]:
    """A column of the row table."""
    return [value for batch in artifact.row_batches([name]) for value in batch.column(0).to_pylist()]


def _codes(values: list[Any]) -> NDArray[np.int64]:
    """Numbers for labels; rows without a label are each alone."""
    numbers: dict[Any, int] = {}
    out = [numbers.setdefault(("none", i) if value is None else value, len(numbers)) for i, value in enumerate(values)]
    return np.array(out, dtype=np.int64)


def _yes_or_no(artifact: Artifact, name: str, flag: str) -> NDArray[np.bool_]:
    """A column of true and false, or 1 and 0, in every row."""
    values = column(artifact, name)
    for i, value in enumerate(values):
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            row = column(artifact, "row_id")[i]
            raise SettingsError(
                f"{flag} {name}: row {row} has {'no value' if value is None else repr(value)}, expected true or false, "
                "or 1 or 0, in every row; fill the column in and build again"
            )
    return np.array(values, dtype=np.bool_)


def table(artifact: Artifact, found: Suspects, target: str) -> pa.Table:
    """Every row, the most suspicious first: rank, row_id, flagged, each score, and the unit that a row matches.

    The metadata of its schema has, as JSON, what decided the flags, what they were made from, and how the scores
    compare with the truth.
    """
    order_N = found.order_N
    names = column(artifact, "row_id")
    columns: dict[str, Any] = {
        "rank": np.arange(1, len(order_N) + 1),
        "row_id": [names[i] for i in order_N],
        "flagged": found.flagged_N[order_N],
        **{name: score_N[order_N] for name, score_N in found.scores.items()},
    }
    if found.match_E is not None:
        units = artifact.units.take(pa.array(artifact.unit_columns(target)))["unit_id"].to_pylist()
        columns["unit_id"] = [units[e] for e in found.match_E[order_N]]
        columns["exact_copy"] = found.copy_N[order_N]
    return pa.table(columns).replace_schema_metadata({SAID: json.dumps(_said(artifact, found, target))})


def _said(artifact: Artifact, found: Suspects, target: str) -> dict[str, Any]:
    """What the table alone does not say, for those who read it later."""
    return {
        "target": target,
        "ranking": found.ranking,
        "made_from": made_from(artifact, target),
        "rows": artifact.n_rows,
        "threshold": asdict(found.threshold),
        "detections": {name: asdict(one) for name, one in found.detections.items()},
        "notes": list(found.notes),
    }


def write_table(artifact: Artifact, found: Suspects, target: str, path: Path) -> int:
    """The table as Parquet, whole or not at all; returns its rows."""
    rows = table(artifact, found, target)
    with written_aside(path) as part:
        pq.write_table(rows, part)
    return int(rows.num_rows)
