"""From a predicted change to nats a token, with an interval that widens with the distance from what was retrained.

Runs b of an environment have a predicted change v_b, a realized utility U_b, and a distance g_b from the corpus. What
the prediction does not see of two subsets differs in proportion to how far they are apart (a linear variogram), so a
run's error has the variance s^2 g_b, and weighted least squares (weights 1 / g_b) gives U = a + slope v and s^2 (n - 2
degrees of freedom). For a subset with the predicted change v and the distance g the interval is

    slope v  +-  t s sqrt(v^2 / Sxx + g),          Sxx = sum_b (v_b - mean v)^2 / g_b.

The first term is the leverage: the error of the slope, taken as far as the question goes. By the second a subset as far
from the corpus as the runs were errs as they did, the corpus itself not at all, one that is farther more than they. t
is Student's quantile. g is d^2 over its mean of the runs, the largest by three measures: weights, N sum w^2 /
(sum w)^2 - 1 (for plain subsets the size, N / |S| - 1), and the mean hidden and residual sketch of the rows.

The interval is for the mean over training seeds: noise between two single runs of one subset comes on top.
Shape letters: B subsets, T targets.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from scipy.stats import t as student

from grasp.errors import EnvironmentDataError
from grasp.predict.predictor import Predictor, SubsetSums
from grasp.predict.row_arrays import F64
from grasp.predict.weights import Weights

COVERAGE = 0.9
FEWEST = 5  # runs that a line is fitted to
LEAST = 0.1
SLACK = 1e-9
NAMED = 3  # subsets in a sentence


@dataclass(frozen=True, slots=True)
class NatsLine:
    """Realized utility against the predicted change, for one target."""

    slope: float  # nats a token for one unit of change
    spread: float  # t s: half an interval at the distance of a run
    scatter: float  # Sxx
    least: float  # the lowest and the highest predicted change that it was fitted to, the corpus included
    most: float

    @classmethod
    def fit(cls, target: str, change_B: F64, realized_B: F64, distance_B: F64, coverage: float = COVERAGE) -> Self:
        """Weighted least squares.

        Args:
            distance_B: of the runs from the corpus, squared, over its mean; what is nearer than LEAST counts as that.
        Raises:
            EnvironmentDataError: too few runs, or predictions that are all the same.
        """
        n_runs = len(change_B)
        if n_runs < FEWEST:
            raise EnvironmentDataError(
                f"intervals of {target}: got {n_runs} runs, expected at least {FEWEST}; retrain on more subsets"
            )
        weight_B = 1.0 / np.maximum(distance_B, LEAST)
        centred_B = change_B - np.average(change_B, weights=weight_B)
        scatter = float(weight_B @ centred_B**2)
        if scatter == 0 or np.ptp(change_B) == 0:
            raise EnvironmentDataError(f"intervals of {target}: predictions of all runs are the same; no line fits")
        slope = float((weight_B * centred_B) @ realized_B) / scatter
        rest_B = realized_B - np.average(realized_B, weights=weight_B) - slope * centred_B
        variance = float(weight_B @ rest_B**2) / (n_runs - 2)
        spread = float(student.ppf(0.5 + coverage / 2, n_runs - 2)) * math.sqrt(variance)
        return cls(slope, spread, scatter, min(0.0, float(change_B.min())), max(0.0, float(change_B.max())))

    def half(self, change_B: F64, distance_B: F64) -> F64:
        """Half the width of the interval, (B,)."""
        return np.asarray(self.spread * np.sqrt(change_B**2 / self.scatter + distance_B))

    def beyond(self, change: float) -> bool:
        """Whether a change lies outside of those that the line was fitted to."""
        slack = SLACK * max(abs(self.least), abs(self.most))
        return not self.least - slack <= change <= self.most + slack


@dataclass(frozen=True, slots=True)
class Reach:
    """How far the runs were from the corpus, squared, by one measure."""

    mean: float
    most: float


@dataclass(frozen=True, slots=True)
class NatsTable:
    """Change of realized utility of B subsets in nats a token, (B, T); nan where a target has no line."""

    nats_BT: F64
    low_BT: F64
    high_BT: F64
    outside: tuple[str, ...]  # for each subset: in which way it lies beyond the runs; empty: it does not
    unit: str = "nats"  # nats a token, or the metric of the runs

    @property
    def columns(self) -> dict[str, F64]:
        """By the names that they have in every table."""
        return dict(zip(columns_of(self.unit), (self.nats_BT, self.low_BT, self.high_BT), strict=True))


def columns_of(unit: str) -> tuple[str, str, str]:
    """Columns of the expected change and its interval."""
    return unit, f"{unit}_low", f"{unit}_high"


class Outside:
    """Counts, while predictions are made, the subsets that lie beyond what the runs covered."""

    def __init__(self) -> None:
        self._first: list[str] = []
        self._count = 0

    def add(self, names: Sequence[str], nats: NatsTable) -> None:
        """One block of subsets."""
        found = [f"{name} ({words})" for name, words in zip(names, nats.outside, strict=True) if words]
        self._count += len(found)
        self._first += found[: NAMED - len(self._first)]

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence, if there is anything to say."""
        if not self._count:
            return ()
        more = f" and {self._count - len(self._first):,} more" if self._count > len(self._first) else ""
        return (f"outside of what the runs covered, so the interval is wider: {'; '.join(self._first)}{more}",)


@dataclass(frozen=True, slots=True)
class Intervals:
    """What the runs of one environment say of the predictions of one predictor."""

    title: str  # what the intervals are, in words
    lines: Mapping[str, NatsLine]  # by target
    reach: Mapping[str, Reach]  # by measure
    notes: tuple[str, ...]

    def of(self, predictor: Predictor, sums: SubsetSums, change_BT: F64) -> NatsTable:
        """Intervals of subsets.

        Args:
            predictor: the one that the lines were fitted with, or one of the same protocol.
            sums: of the subsets.
            change_BT: what is predicted of them.
        """
        by_measure = {name: d_B for name, d_B in distances(predictor, sums).items() if name in self.reach}
        distance_B = relative(by_measure, self.reach)
        nats, half = np.full(change_BT.shape, np.nan), np.full(change_BT.shape, np.nan)
        for t, target in enumerate(predictor.targets):
            if target in self.lines:
                nats[:, t] = self.lines[target].slope * change_BT[:, t]
                half[:, t] = self.lines[target].half(change_BT[:, t], distance_B)
        outside = [
            self._outside(
                {name: float(d_B[b]) for name, d_B in by_measure.items()},
                dict(zip(predictor.targets, change_BT[b].tolist(), strict=True)),
            )
            for b in range(len(change_BT))
        ]
        return NatsTable(nats, nats - half, nats + half, tuple(outside))

    def _outside(self, distance: Mapping[str, float], change: Mapping[str, float]) -> str:
        known = {name: reach for name, reach in self.reach.items() if name in distance and reach.most > 0}
        times = max(math.sqrt(max(distance[name], 0.0) / reach.most) for name, reach in known.items())
        far = [f"{times:.1f} times as far from the corpus as any run"] if times > 1 + 1e-6 else []
        beyond = [name for name, line in self.lines.items() if name in change and line.beyond(change[name])]
        if beyond:
            far.append(f"the predicted change of {', '.join(beyond)} is larger than that of any run")
        return "; ".join(far)


def relative(distance: Mapping[str, F64], reach: Mapping[str, Reach]) -> F64:
    """The largest of the distances, each against the mean of the runs, (B,)."""
    each = [d_B / reach[name].mean for name, d_B in distance.items() if reach[name].mean > 0]
    return np.asarray(np.max(each, axis=0))


class Expectation(Protocol):
    """What runs say of the predictions of one predictor: made by `grasp.runs.learning.learn`."""

    @property
    def unit(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def notes(self) -> tuple[str, ...]: ...
    def of(self, weights: Weights) -> NatsTable:
        """Of one block of subsets."""


FitIntervals = Callable[[Predictor], Expectation]


def distances(predictor: Predictor, sums: SubsetSums) -> dict[str, F64]:
    """d^2 of B subsets from the corpus by every measure that the predictor has, (B,) each.

    Source: eq:centered-mean-deviation, of weights that add up to 1.
    """
    weight_B = sums.mass.retained_B
    out = {"weights": np.maximum(predictor.n_rows * sums.square_B / weight_B**2 - 1.0, 0.0)}
    for half, part in sums.sketch.items():
        if half != "product":
            out[half] = part.geometry(sums.mass, predictor.sketches[half].totals, "retained", "mean").cent_B
    return out


def measures(array_names: tuple[str, ...]) -> tuple[str, ...]:
    """Sketches that a predictor should be prepared with, so that distances can be told."""
    return tuple(half for half in ("hidden", "residual") if f"{half}_sketch" in array_names)
