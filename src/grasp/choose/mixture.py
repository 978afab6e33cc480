"""Weights for the values of a label that maximise predicted utility: a mixture to train on.

A mixture p gives every row of slice g the weight N p_g / n_g: the corpus itself is p_g = n_g / N, and the amount of
data stays what it is. With mean relevance a_g, mean sketch m_g and mean squared norm q_g of each slice, and f = 1
under the weighting `mean`, N under `count`,

    A = f sum_g p_g a_g,   K_raw = f^2 |sum_g p_g m_g|^2,   K_cent = f^2 |sum_g p_g (m_g - mean)|^2,
    K_self = f^2 sum_g p_g^2 q_g / n_g,

so V is linear plus quadratic in p. On the omitted side with `count` every row counts 1 - w, which is quadratic as
well. With `mean` it is not: there V depends on the direction of a change alone, and such a protocol is refused.
Shape letters: G slices, N rows, T targets, D sketch width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from grasp.choose.amounts import Amount, Bound
from grasp.choose.limits import value_code
from grasp.choose.objective import Slopes
from grasp.choose.quadratic_program import Programme, Solution, solve
from grasp.errors import ProtocolError, SettingsError
from grasp.predict.blocks import SubsetBlock
from grasp.predict.geometry import QuadraticWeights, SketchSums, SketchTotals, SubsetMass
from grasp.predict.label_slices import LabelSlices
from grasp.predict.protocol import ScoringProtocol
from grasp.predict.scorer import Scorer, SubsetSums
from grasp.predict.source import F64
from grasp.predict.subset_tables import RowIndex, write_subsets

SHOWN = 5
SEEN_OFTEN = 4.0  # data repeated more often is known to be worth less and less
MIXTURE = "mixture"


@dataclass(frozen=True, slots=True)
class MixRequest:
    """What is asked of a mixture."""

    slices: LabelSlices
    targets: Mapping[str, float]  # weights that add up to 1
    floors: Sequence[Bound] = ()
    caps: Sequence[Bound] = ()
    distance: Amount | None = None  # share of the data that may change hands; none: all of it


@dataclass(frozen=True, slots=True)
class Mixture:
    """Current and proposed weights of the slices of a label, and what the change is predicted to bring."""

    label: str
    names: tuple[str, ...]
    expressions: tuple[str, ...]
    rows_G: F64 = field(repr=False)
    current_G: F64
    proposed_G: F64
    targets: Mapping[str, float]
    utility: Mapping[str, float]  # predicted of the proposed mixture, by target
    current_utility: Mapping[str, float]
    is_global: bool
    starts: int
    n_grouped: int
    distance: float  # total variation between current and proposed
    sums: SubsetSums = field(repr=False)  # of the proposed mixture
    protocol: ScoringProtocol = field(repr=False)
    calibration: str
    notes: tuple[str, ...]

    @property
    def factor_G(self) -> F64:  # noqa: N802 - a shape suffix
        """How often a row is seen against now."""
        return self.proposed_G / self.current_G

    @property
    def value(self) -> float:
        """Weighted mean of the utilities."""
        return sum(weight * self.utility[name] for name, weight in self.targets.items())

    @property
    def gain(self) -> float:
        """Value against that of the current mixture."""
        return self.value - sum(weight * self.current_utility[name] for name, weight in self.targets.items())

    def summary(self) -> dict[str, Any]:
        """All of it as plain JSON."""
        columns = (self.names, self.expressions, self.rows_G, self.current_G, self.proposed_G)
        return {
            "kind": "mixture",
            "label": self.label,
            "slices": [
                {
                    "value": name,
                    "expression": expression,
                    "rows": int(rows),
                    "current": float(now),
                    "proposed": float(p),
                }
                for name, expression, rows, now, p in zip(*columns, strict=True)
            ],
            "values_grouped": self.n_grouped,
            "targets": dict(self.targets),
            "utility": dict(self.utility),
            "current_utility": dict(self.current_utility),
            "gain": self.gain,
            "distance": self.distance,
            "optimum": "global" if self.is_global else f"local, best of {self.starts} starts",
            "protocol": self.protocol.model_dump(mode="json"),
            "calibration": self.calibration,
            "notes": list(self.notes),
        }


def mix_with(scorer: Scorer, request: MixRequest) -> Mixture:
    """Find the mixture with a scorer that is bound to the request's targets.

    Raises:
        ProtocolError: a protocol of the omitted side with weighting `mean`.
        SettingsError: floors, caps and distance that no mixture satisfies, or in numbers of rows.
    """
    _check_protocol(scorer.protocol)
    slices, weights_T = request.slices, np.array([request.targets.get(name, 0.0) for name in scorer.units.targets])
    parts = scorer.sums(slices.indicators())
    rows_G = slices.rows_G.astype(np.float64)
    current_G = rows_G / scorer.n_rows
    low_G, high_G = _bounds(request)
    linear_G, quadratic_GG = _coefficients(scorer, Slopes.of(scorer, weights_T), parts, rows_G)
    distance = None if request.distance is None else request.distance.value
    programme = Programme(linear_G, quadratic_GG, low_G, high_G, current_G, distance)
    solution = solve(programme)
    sums = _mixture_sums(parts, solution.p_G, rows_G, scorer.n_rows)
    names = scorer.units.targets
    proposed_T = scorer.score_tasks(sums)[1].utility_BE[0]
    current_T = scorer.score_tasks(scorer.whole())[1].utility_BE[0]
    return Mixture(
        label=slices.label,
        names=tuple(one.name for one in slices.slices),
        expressions=tuple(one.expression for one in slices.slices),
        rows_G=rows_G,
        current_G=current_G,
        proposed_G=solution.p_G,
        targets=dict(request.targets),
        utility=dict(zip(names, map(float, proposed_T), strict=True)),
        current_utility=dict(zip(names, map(float, current_T), strict=True)),
        is_global=solution.is_global,
        starts=solution.starts,
        n_grouped=slices.n_grouped,
        distance=0.5 * float(np.abs(solution.p_G - current_G).sum()),
        sums=sums,
        protocol=scorer.protocol,
        calibration=scorer.calibration,
        notes=tuple(_notes(scorer, request, programme, solution)),
    )


def write_weights(mixture: Mixture, slices: LabelSlices, index: RowIndex, path: Path) -> None:
    """The mixture as a table of one weighted subset, `mixture`, that `grasp predict --subsets` reads."""
    write_subsets(path, [SubsetBlock((MIXTURE,), slices.weights(mixture.factor_G[None]))], index, weights=True)


def _check_protocol(protocol: ScoringProtocol) -> None:
    if protocol.side == "omitted" and protocol.weighting == "mean":
        raise ProtocolError(
            f"protocol {protocol.name!r} scores the mean of what is left out, which has no size for a mixture; choose "
            "one that scores the retained side, or counts"
        )


def _bounds(request: MixRequest) -> tuple[F64, F64]:
    """(G,) least and greatest weights.

    Raises:
        SettingsError: a bound in rows, of an unknown value, or bounds that cannot be met: which.
    """
    names = [one.name for one in request.slices.slices]
    low_G = _shares(request.floors, "--floor", request.slices, np.zeros(len(names)))
    high_G = _shares(request.caps, "--cap", request.slices, np.ones(len(names)))
    short = [
        f"{names[g]} has a floor of {low_G[g]:.1%} and a cap of {high_G[g]:.1%}"
        for g in np.flatnonzero(low_G > high_G).tolist()
    ]
    if low_G.sum() > 1.0 + 1e-12:
        short.append(f"the floors add up to {low_G.sum():.1%}")
    if high_G.sum() < 1.0 - 1e-12:
        short.append(f"the caps add up to {high_G.sum():.1%}, expected 100% at least")
    short += _too_far(request, names, low_G, high_G)
    if short:
        more = f"; and {len(short) - SHOWN} more" if len(short) > SHOWN else ""
        raise SettingsError(f"--floor, --cap: cannot be met: {'; '.join(short[:SHOWN])}{more}")
    return low_G, high_G


def _too_far(request: MixRequest, names: Sequence[str], low_G: F64, high_G: F64) -> list[str]:
    """Whether keeping the bounds alone moves more data than the distance allows."""
    if request.distance is None:
        return []
    current_G = request.slices.rows_G / request.slices.rows_G.sum()
    up_G, down_G = np.maximum(low_G - current_G, 0.0), np.maximum(current_G - high_G, 0.0)
    needed = max(float(up_G.sum()), float(down_G.sum()))
    if needed <= request.distance.value + 1e-12:
        return []
    worst = names[int(np.argmax(np.maximum(up_G, down_G)))]
    return [
        f"they move {needed:.1%} of the data, {worst} most of it, and --distance allows {request.distance.value:.1%}"
    ]


def _shares(bounds: Sequence[Bound], flag: str, slices: LabelSlices, default_G: F64) -> F64:
    names = [one.name for one in slices.slices]
    out_G = default_G
    for bound in sorted(bounds, key=lambda bound: bound.value is not None):
        if not bound.amount.is_share or bound.amount.unit is not None:
            of = "of every value" if bound.value is None else bound.value
            raise SettingsError(f"{flag} {of}: got a number, a mixture has shares; expected e.g. Games:5%")
        if bound.value is None:
            out_G = np.full(len(names), bound.amount.value)
            continue
        out_G[value_code(bound.value, names, flag, slices.label, slices.n_grouped)] = bound.amount.value
    return out_G


def _coefficients(scorer: Scorer, slopes: Slopes, parts: SubsetSums, rows_G: F64) -> tuple[F64, F64]:
    """l (G,) and Q (G, G) of V(p) = constant + l'p + p'Q p."""
    factor = 1.0 if scorer.protocol.weighting == "mean" else float(scorer.n_rows)
    omitted = scorer.protocol.side == "omitted"
    linear_G = np.zeros(len(rows_G))
    for kernel, slope_T in slopes.relevance_T.items():
        linear_G += factor * (parts.task[kernel] @ slope_T) / rows_G
    quadratic_GG = np.zeros((len(rows_G), len(rows_G)))
    for half, weights in slopes.halves.items():
        totals = scorer.sketches[half].totals
        mean_GD = parts.sketch[half].total_BD / rows_G[:, None]
        norm_G = parts.sketch[half].norm_B / rows_G
        centred_GD = mean_GD - totals.mean_D
        quadratic_GG += factor**2 * (weights.raw * mean_GD @ mean_GD.T + weights.cent * centred_GD @ centred_GD.T)
        quadratic_GG += factor**2 * weights.own * np.diag(norm_G / rows_G)
        if omitted:
            linear_G += _omitted_linear(weights, totals, factor, mean_GD, norm_G)
    return linear_G, quadratic_GG


def _omitted_linear(weights: QuadraticWeights, totals: SketchTotals, factor: float, mean_GD: F64, norm_G: F64) -> F64:
    """Linear part of ||T - N sum p m||^2 and of sum_g n_g q_g (1 - N p_g / n_g)^2; factor is N here."""
    return -2.0 * factor * (weights.raw * mean_GD @ totals.total_D + weights.own * norm_G)


def _mixture_sums(parts: SubsetSums, p_G: F64, rows_G: F64, n_rows: int) -> SubsetSums:
    """All that the scorer needs of the corpus with the weights N p_g / n_g."""
    weight_1G = (n_rows * p_G / rows_G)[None]
    return SubsetSums(
        mass=SubsetMass(weight_1G @ rows_G, np.abs(1.0 - weight_1G) @ rows_G, n_rows),
        task={kernel: weight_1G @ part for kernel, part in parts.task.items()},
        unit={},
        sketch={
            half: SketchSums(weight_1G @ part.total_BD, weight_1G @ part.norm_B, weight_1G**2 @ part.norm_B)
            for half, part in parts.sketch.items()
        },
    )


def _notes(scorer: Scorer, request: MixRequest, programme: Programme, solution: Solution) -> list[str]:
    notes, slices = [], request.slices
    if slices.n_grouped:
        notes.append(f"{slices.n_grouped:,} of the values are small and share one slice, whose inner mixture stays")
    if scorer.dropped:
        notes.append(f"left out, since it does not vary over the calibration family: {', '.join(scorer.dropped)}")
    if not solution.is_global:
        notes.append(
            "the protocol rewards a part of the geometry, so the problem is not convex: the best of "
            f"{solution.starts} local searches is shown, and there may be a better mixture"
        )
    if not programme.quadratic_GG.any():
        notes.append(
            "the protocol is additive: V is linear and its best mixture a corner of what --floor, --cap and "
            "--distance allow; --diversity keeps it from one"
        )
    often = [
        f"{one.name} {factor:.1f} times"
        for one, factor in zip(slices.slices, solution.p_G / programme.current_G, strict=True)
        if factor > SEEN_OFTEN
    ]
    if often:
        more = f" and {len(often) - SHOWN} more" if len(often) > SHOWN else ""
        notes.append(
            f"seen far more often than now: {', '.join(often[:SHOWN])}{more}; repeats are worth less than new rows"
        )
    return notes
