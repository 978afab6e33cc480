"""Which rows look wrong to a trusted target set, and which hold a target's own text.

Shape letters: N rows, E units, D sketch width.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from grasp.artifact.reader import RELEVANCE, Artifact
from grasp.audit.detection import Detection, Threshold, disagreement, fused, measure, threshold
from grasp.curation.suspects import SAID
from grasp.errors import ArtifactError, SettingsError

if TYPE_CHECKING:
    from grasp.protocol.ranking import MethodRows

F64 = NDArray[np.float64]
NEIGHBOURS = 10
FALSE_POSITIVE_RATE = 0.01
CLASS_LABEL, HASH_LABEL = "image_class", "image_hash"
LISTED = 10
KERNELS = ("token", "pooled", "input")


@dataclass(frozen=True, slots=True)
class Suspects:
    """Scores of all rows, higher for more suspicious ones, and what is known of them."""

    scores: Mapping[str, F64]  # by name; the last one ranks
    match_E: NDArray[np.int64] | None  # unit that a row matches best, for contamination
    threshold: Threshold
    detections: Mapping[str, Detection]  # of each score, where there is a truth
    notes: tuple[str, ...]

    @property
    def ranking(self) -> str:
        return list(self.scores)[-1]

    @property
    def order_N(self) -> NDArray[np.int64]:  # noqa: N802 - a shape suffix
        """Rows, the most suspicious first."""
        return np.argsort(-self.scores[self.ranking], kind="stable")

    @property
    def flagged_N(self) -> NDArray[np.bool_]:  # noqa: N802 - a shape suffix
        return np.asarray(self.scores[self.ranking] > self.threshold.value)


def detect(
    artifact: Artifact,
    target: str,
    *,
    label: str | None = None,
    truth: str | None = None,
    k: int | None = None,
    neighbours: int = NEIGHBOURS,
    match: str | None = None,
    false_positive_rate: float = FALSE_POSITIVE_RATE,
) -> Suspects:
    """Rank rows by how wrong they look to the trusted units of `target`.

    `relevance` is minus the mean relevance to the units, each standardised over the rows; `geometry`, where rows have
    a label, is the share of a row's nearest neighbours in the hidden sketch with another label; `fused` the mean of
    their ranks.

    Args:
        label: column of labels; None: the class of images, of texts none.
        truth: column that says which rows were planted (true, or not 0).
        k: rows to look at in the precision and recall; None: as many as were planted.
        match: relevance kernel; None: token where it is built.
    Raises:
        ArtifactError: no such target, column or kernel; a trusted unit that is itself a row (all listed).
        SettingsError: a number out of range, or a truth in which nothing or everything is planted.
    """
    if neighbours < 1:
        raise SettingsError(f"neighbours: got {neighbours}, expected at least 1")
    notes = list(refuse_overlap(artifact, target))
    scores: dict[str, F64] = {"relevance": -standardised(artifact, target, match).mean(axis=1)}
    label = label or (CLASS_LABEL if CLASS_LABEL in _columns(artifact) else None)
    if label is not None:
        score_N, alone_N = disagreement(_all(artifact, "hidden_sketch"), _codes(column(artifact, label)), neighbours)
        if alone_N.any():
            notes.append(f"{int(alone_N.sum())} rows are alone with their {label}: geometry says nothing of them")
        scores |= {"geometry": score_N, "fused": fused([scores["relevance"], score_N])}
    return _suspects(artifact, scores, None, truth, k, false_positive_rate, notes)


def contamination(
    artifact: Artifact,
    target: str,
    *,
    truth: str | None = None,
    k: int | None = None,
    match: str | None = None,
    false_positive_rate: float = FALSE_POSITIVE_RATE,
    others: Mapping[str, F64] | None = None,
) -> Suspects:
    """Rank rows by how much they look like a unit of `target`: the largest standardised relevance over its units.

    A row that holds a unit's text has relevance to that unit far beyond what other rows have.

    Args:
        others: scores of other methods, (N, E of the target) each, compared in the same way.
    Raises:
        ArtifactError, SettingsError: as `detect`, but for overlap, which is what is looked for.
    """
    relevance_NE = standardised(artifact, target, match)
    scores = {name: _over_rows(score_NE).max(axis=1) for name, score_NE in (others or {}).items()}
    scores["contamination"] = relevance_NE.max(axis=1)
    best_N = relevance_NE.argmax(axis=1)
    return _suspects(artifact, scores, best_N, truth, k, false_positive_rate, [])


def _suspects(
    artifact: Artifact,
    scores: Mapping[str, F64],
    best_N: NDArray[np.int64] | None,
    truth: str | None,
    k: int | None,
    rate: float,
    notes: list[str],
) -> Suspects:
    detections: dict[str, Detection] = {}
    if truth is not None:
        planted_N = _planted(column(artifact, truth), truth)
        detections = {name: measure(score_N, planted_N, k) for name, score_N in scores.items()}
    cut = threshold(list(scores.values())[-1], rate, largest=best_N is not None)
    if cut.all_alike:
        notes.append("most rows have one and the same score: the threshold says nothing")
    return Suspects(scores, best_N, cut, detections, tuple(notes))


def refuse_overlap(artifact: Artifact, target: str) -> Iterator[str]:
    """See that no trusted unit is a row of the corpus; yields a note where that cannot be seen.

    Images are compared by their pixels, texts by their beginning as far as the row table keeps it.

    Raises:
        ArtifactError: some are, all listed (the first ten by name).
    """
    units = artifact.units.take(pa.array(artifact.unit_columns(target))).to_pylist()
    is_image = HASH_LABEL in _columns(artifact)
    keys = column(artifact, HASH_LABEL if is_image else "snippet")
    names = column(artifact, "row_id")
    if not is_image and not any(keys):
        yield "overlap of trusted units and rows was not looked for: the artifact keeps no snippets"
        return
    rows = {str(key): str(name) for key, name in zip(keys, names, strict=True) if key}
    longest = max((len(key) for key in rows), default=0)
    found = []
    for unit in units:
        text = unit["prompt"].split(",")[0].removeprefix("image ") if is_image else _folded(unit, longest)
        if text in rows:
            found.append(f"{unit['unit_id']} = {rows[text]}")
    if found:
        more = f" and {len(found) - LISTED} more" if len(found) > LISTED else ""
        raise ArtifactError(
            f"{artifact.path}: {len(found)} of {len(units)} trusted units of {target} are rows of the corpus: "
            f"{', '.join(found[:LISTED])}{more}; take them out of one of the two and build again (for leaked targets: "
            "--contamination)"
        )


def _folded(unit: Mapping[str, Any], longest: int) -> str:
    return " ".join((unit["prompt"] + unit["completion"]).split())[:longest]


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


def _planted(values: list[Any], name: str) -> NDArray[np.bool_]:
    strange = sorted({type(value).__name__ for value in values if not isinstance(value, bool | int | float | None)})
    if strange:
        raise SettingsError(f"--truth {name}: holds {', '.join(strange)}, expected true and false, or 1 and 0")
    return np.array([bool(value) for value in values])


def table(artifact: Artifact, found: Suspects, target: str) -> pa.Table:
    """Every row, the most suspicious first: rank, row_id, flagged, each score, and the unit that a row matches.

    The metadata of its schema has, as JSON, what decided the flags and how the scores compare with the truth.
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
    return pa.table(columns).replace_schema_metadata({SAID: json.dumps(_said(artifact, found, target))})


def _said(artifact: Artifact, found: Suspects, target: str) -> dict[str, Any]:
    """What the table alone does not say, for those who read it later."""
    return {
        "target": target,
        "ranking": found.ranking,
        "corpus": artifact.manifest.fingerprints.get("corpus", ""),
        "rows": artifact.n_rows,
        "threshold": asdict(found.threshold),
        "detections": {name: asdict(one) for name, one in found.detections.items()},
        "notes": list(found.notes),
    }


def write_table(artifact: Artifact, found: Suspects, target: str, path: Path) -> int:
    """The table as Parquet, whole or not at all; returns its rows."""
    part = path.with_name(path.name + ".part")
    rows = table(artifact, found, target)
    pq.write_table(rows, part)
    part.replace(path)
    return int(rows.num_rows)
