"""Rows under a budget that maximise the predictor itself, with a certificate of how good they are.

Shape letters: N rows, T targets, G values of a label.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grasp.choose.amounts import Amount, Bound, Unit
from grasp.choose.certificate import Certificate, Curve, curve_of, is_aligned, prefix_places, sums_of, upper_bound
from grasp.choose.greedy import Picks, choose
from grasp.choose.limits import I64, Limits
from grasp.choose.objective import Objective
from grasp.choose.sketches import ChosenRows
from grasp.errors import SettingsError
from grasp.predict.labels import LabelColumn
from grasp.predict.protocol import ScoringProtocol
from grasp.predict.row_tables import row_tokens
from grasp.predict.scorer import CalibrationFamily, Scorer, SubsetSums
from grasp.predict.source import F64

SIZES_TRIED = 4  # a budget in tokens is a number of rows only once rows are chosen
SIZE_SHARE = 0.005


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of a selection."""

    budget: Amount
    targets: Mapping[str, float]  # weights that add up to 1
    labels: LabelColumn | None = None  # that floors and caps speak of
    floors: Sequence[Bound] = ()
    caps: Sequence[Bound] = ()
    excluded_N: NDArray[np.bool_] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class LabelShare:
    """One value of the label in a selection; amounts are in the unit of the budget."""

    value: str
    pool: int
    taken: int
    floor: int
    cap: int


@dataclass(frozen=True, slots=True)
class RowSelection:
    """Rows in the order in which they were taken, and what is known of them."""

    row_index: I64 = field(repr=False)
    gain: F64 = field(repr=False)  # exact marginal gain when taken, in the unit of utility
    n_rows: int
    n_excluded: int
    n_tokens: int
    budget: int
    unit: Unit
    targets: Mapping[str, float]
    utility: Mapping[str, float]  # predicted, by target: the numbers of `grasp predict`
    whole: Mapping[str, float]  # of the whole corpus, by target
    certificate: Certificate
    curve: Curve
    sums: SubsetSums = field(repr=False)  # of the chosen rows
    labels: tuple[LabelShare, ...]
    protocol: ScoringProtocol
    calibration: str
    rounds: int
    notes: tuple[str, ...]

    @property
    def value(self) -> float:
        """Weighted mean of the utilities."""
        return self.certificate.value

    def summary(self) -> dict[str, Any]:
        """All but the rows, as plain JSON."""
        known, curve = self.certificate, self.curve
        return {
            "kind": "selection",
            "rows": len(self.row_index),
            "tokens": self.n_tokens,
            "corpus_rows": self.n_rows,
            "excluded_rows": self.n_excluded,
            "budget": self.budget,
            "unit": self.unit,
            "targets": dict(self.targets),
            "value": known.value,
            "utility": dict(self.utility),
            "utility_of_the_corpus": dict(self.whole),
            "bound": known.bound,
            "bound_reason": known.bound_reason,
            "aligned": known.aligned,
            "searched": known.searched,
            "guarantee": guarantee(self),
            "curve": {"rows": list(curve.rows), "tokens": list(curve.tokens), "value": list(curve.value)},
            "labels": [
                {"value": one.value, "pool": one.pool, "taken": one.taken, "floor": one.floor, "cap": one.cap}
                for one in self.labels
            ],
            "protocol": self.protocol.model_dump(mode="json"),
            "calibration": self.calibration,
            "notes": list(self.notes),
        }


def with_diversity(protocol: ScoringProtocol, weight: float, array_names: Sequence[str]) -> ScoringProtocol:
    """The protocol with a penalty on K_raw as its only geometry; weight 0 takes its geometry away.

    The penalty is on the joint sketch where the artifact has both halves, else on the sketch that it has.

    Raises:
        SettingsError: a negative weight, or no sketch to measure diversity by.
    """
    if not 0 <= weight < np.inf:
        raise SettingsError(f"--diversity: got {weight:g}, expected 0 or more: the weight of the penalty on redundancy")
    built = [half for half in ("hidden", "residual", "product") if f"{half}_sketch" in array_names]
    if weight and not built:
        raise SettingsError("--diversity: the artifact has no sketch to measure it by; leave it out, or build sketches")
    half = "joint" if {"hidden", "residual"} <= set(built) else (built[-1] if built else "")
    components = {f"{half}.raw": -weight} if weight else {}
    name = f"{protocol.name}, diversity {weight:g}"
    return protocol.model_copy(update={"name": name, "components": components, "selected_on": None})


def select(
    source: ChosenRows,
    protocol: ScoringProtocol,
    request: Request,
    *,
    calibration: CalibrationFamily | None = None,
    progress: Callable[[int], None] | None = None,
) -> RowSelection:
    """Choose rows for a weighted set of targets.

    Args:
        calibration: what standardises; none: the protocol's own family.
        progress: called with the number of rows taken so far.
    Raises:
        ProtocolError: the artifact does not fit the protocol, or lacks a target.
        SettingsError: a budget, floor or cap that cannot be met.
    """
    scorer = Scorer.prepare(source, protocol, targets=list(request.targets), calibration=calibration)
    return select_with(scorer, source, request, progress=progress)


def select_with(
    scorer: Scorer, source: ChosenRows, request: Request, *, progress: Callable[[int], None] | None = None
) -> RowSelection:
    """Choose rows with a scorer that is bound to the request's targets already."""
    tokens_N = row_tokens(source)
    allowed_N = np.ones(scorer.n_rows, dtype=np.bool_) if request.excluded_N is None else ~request.excluded_N
    limits = Limits.of(
        request.budget, allowed_N, tokens_N=tokens_N, labels=request.labels, floors=request.floors, caps=request.caps
    )
    weights_T = np.array([request.targets.get(name, 0.0) for name in scorer.units.targets])
    objective, picks = _chosen(source, scorer, weights_T, limits, progress)
    sums = sums_of(scorer, picks.row_index)
    curve = curve_of(scorer, weights_T, picks.row_index, tokens_N, prefix_places(len(picks.row_index)), sums)
    bound, reason = upper_bound(objective, limits, picks.row_index)
    value = curve.value[-1]
    certificate = Certificate(
        value=value,
        bound=None if bound is None else max(bound, value),
        bound_reason=reason,
        aligned=is_aligned(objective, limits),
        searched=picks.searched,
    )
    names = scorer.units.targets
    whole_T = scorer.score_tasks(scorer.whole())[1].utility_BE[0]
    return RowSelection(
        row_index=picks.row_index,
        gain=picks.gain,
        n_rows=scorer.n_rows,
        n_excluded=int((~allowed_N).sum()),
        n_tokens=curve.tokens[-1],
        budget=limits.budget,
        unit=limits.unit,
        targets=dict(request.targets),
        utility=dict(zip(names, curve.per_target[-1], strict=True)),
        whole=dict(zip(names, map(float, whole_T), strict=True)),
        certificate=certificate,
        curve=curve,
        sums=sums,
        labels=() if request.labels is None else _shares(limits, picks),
        protocol=scorer.protocol,
        calibration=scorer.calibration,
        rounds=picks.rounds,
        notes=tuple(_notes(scorer, objective, limits, picks, curve)),
    )


def guarantee(selection: RowSelection) -> str:
    """What is proven of the selection, in words."""
    known = selection.certificate
    if not selection.protocol.components and selection.unit == "rows":
        return "optimal: the protocol is additive"
    if known.bound is None:
        return f"no upper bound: {known.bound_reason}"
    if known.aligned and known.searched and selection.unit == "rows" and bool((selection.gain >= 0).all()):
        return "at least 1 - 1/e of the best gain: the pool is aligned, hence V submodular, and no gain is negative"
    why = (
        "every geometry is a penalty, hence the relaxation concave"
        if selection.protocol.components
        else "it is that of parts of rows, and the protocol is additive"
    )
    return f"no selection of as many rows exceeds the bound: {why}"


def _chosen(
    source: ChosenRows,
    scorer: Scorer,
    weights_T: F64,
    limits: Limits,
    progress: Callable[[int], None] | None,
) -> tuple[Objective, Picks]:
    """Choose; under a budget in tokens, until the number of rows is the one that was assumed."""
    size = limits.budget
    if limits.cost_N is not None:
        size = max(1, round(limits.budget / float(limits.cost_N[limits.allowed_N].mean())))
    for _ in range(SIZES_TRIED):
        objective = Objective.of(source, scorer, weights_T, min(size, scorer.n_rows))
        picks = choose(objective, limits, progress)
        found = len(picks.row_index)
        if abs(found - size) <= SIZE_SHARE * size:
            break
        size = found
    return (objective if found == size else Objective.of(source, scorer, weights_T, found)), picks


def _shares(limits: Limits, picks: Picks) -> tuple[LabelShare, ...]:
    assert limits.codes_N is not None
    cost_N = np.ones(len(limits.codes_N), dtype=np.int64) if limits.cost_N is None else limits.cost_N
    n_values = len(limits.values)
    pool_G = np.zeros(n_values, dtype=np.int64)
    taken_G = np.zeros(n_values, dtype=np.int64)
    np.add.at(pool_G, limits.codes_N[limits.allowed_N], cost_N[limits.allowed_N])
    np.add.at(taken_G, limits.codes_N[picks.row_index], cost_N[picks.row_index])
    return tuple(
        LabelShare(name, int(pool_G[g]), int(taken_G[g]), int(limits.floor_G[g]), int(limits.cap_G[g]))
        for g, name in enumerate(limits.values)
    )


def _notes(scorer: Scorer, objective: Objective, limits: Limits, picks: Picks, curve: Curve) -> list[str]:
    notes = []
    if scorer.dropped:
        notes.append(f"left out, since it does not vary over the calibration family: {', '.join(scorer.dropped)}")
    if picks.used < limits.budget:
        why = "no row that is left fits" if limits.unit == "tokens" else "the caps leave no more"
        notes.append(f"{picks.used:,} of {limits.budget:,} {limits.unit} were taken: {why}")
    if scorer.protocol.weighting == "count" and curve.peak < len(curve.rows) - 1:
        notes.append(
            f"the value is highest at {curve.rows[curve.peak]:,} rows and falls after them; rows are in order, so the "
            "selection can be cut there"
        )
    if any(bend > 0 for bend in objective.curvature.values()):
        notes.append("the protocol rewards a part of the geometry: rows that resemble one another attract one another")
    return notes
