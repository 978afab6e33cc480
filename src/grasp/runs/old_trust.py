"""What predictions are worth in an environment: intervals for realized utility, and a warning beyond what it covered.

A line is fitted through the development results of one environment, realized against predicted utility, a point a
subset, a line a target. Intervals are those of the jackknife+ (Barber, Candes, Ramdas, Tibshirani 2021): with residuals
of the subsets left out one by one they hold with probability 1 - 2 alpha at least, and 1 - alpha in practice, for a
subset that is drawn as those of the environment were. They are for the mean over the environment's training seeds.
Intervals of a difference between two subsets come from the differences of those residuals.

Nothing says that the line goes on straight beyond the predictions that it was fitted to: a subset that is predicted
higher or lower than all of the environment's is warned of, as is one of another size or one that leans further.

A held-out environment is refused: once it has been fitted to, nothing is left to test the intervals on.
Shape letters: B subsets of the environment, Q subsets asked about, T targets.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from grasp.artifact.reader import Artifact
from grasp.errors import EnvironmentDataError, ProtocolLeakError
from grasp.predict.blocks import SubsetBlock
from grasp.predict.geometry import SketchSums
from grasp.predict.predictions import PredictionTable
from grasp.predict.protocol import ScoringProtocol
from grasp.predict.scorer import CalibrationFamily, Scorer, SubsetSums
from grasp.predict.slices import LabelTable
from grasp.predict.source import F64
from grasp.runs.development import Development
from grasp.runs.environment import Environment

COVERAGE = 0.9
NAMED = 3
SIZE_SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class Interval:
    """Realized utility, or its change, in nats a token; each (Q,)."""

    expected: F64
    low: F64
    high: F64


@dataclass(frozen=True, slots=True)
class UtilityLine:
    """Realized against predicted utility of one target: U = intercept + slope V."""

    target: str
    coverage: float
    slope: float
    intercept: float
    slope_B: F64  # without the subset
    intercept_B: F64
    residual_B: F64  # of the subset, from the line without it

    @classmethod
    def fit(cls, target: str, predicted_B: F64, realized_B: F64, coverage: float = COVERAGE) -> Self:
        """Least squares, and again without each of the subsets.

        Raises:
            EnvironmentDataError: too few subsets for the coverage, or predictions that are all the same.
        """
        alpha, n_subsets = 1.0 - coverage, len(predicted_B)
        needed = max(3, math.ceil(1.0 / alpha - 1e-9) - 1)
        if n_subsets < needed:
            raise EnvironmentDataError(
                f"intervals of {target}: got {n_subsets} subsets, expected at least {needed} for a coverage of "
                f"{coverage:.0%}; retrain on more"
            )
        if np.ptp(predicted_B) == 0:
            raise EnvironmentDataError(f"intervals of {target}: predictions of all subsets are the same; no line fits")
        slope, intercept = _line(predicted_B, realized_B)
        without = [_line(np.delete(predicted_B, b), np.delete(realized_B, b)) for b in range(n_subsets)]
        slope_B, intercept_B = (np.array(column) for column in zip(*without, strict=True))
        residual_B = realized_B - intercept_B - slope_B * predicted_B
        return cls(target, coverage, slope, intercept, slope_B, intercept_B, residual_B)

    def at(self, utility_Q: F64) -> Interval:
        """Expected realized utility of subsets with these predictions, and its jackknife+ interval."""
        line_QB = self.intercept_B + np.outer(utility_Q, self.slope_B)
        return self._around(self.intercept + self.slope * utility_Q, line_QB, np.abs(self.residual_B))

    def change(self, difference_Q: F64) -> Interval:
        """Expected change of realized utility between two subsets whose predictions differ by so much.

        Both subsets are taken to err like any two of the environment's: for subsets that share most of their rows the
        interval is too wide.
        """
        i, j = np.triu_indices(len(self.residual_B), 1)
        error_P = self.residual_B[i] - self.residual_B[j]
        slope_P = 0.5 * (self.slope_B[i] + self.slope_B[j])
        return self._around(self.slope * difference_Q, np.outer(difference_Q, slope_P), np.abs(error_P))

    def _around(self, expected_Q: F64, line_QP: F64, error_P: F64) -> Interval:
        n = line_QP.shape[1]
        rank = min(n, math.ceil(self.coverage * (n + 1) - 1e-9))
        low_Q = np.sort(line_QP - error_P, axis=1)[:, n - rank]
        high_Q = np.sort(line_QP + error_P, axis=1)[:, rank - 1]
        return Interval(expected_Q, np.minimum(low_Q, expected_Q), np.maximum(high_Q, expected_Q))


@dataclass(frozen=True, slots=True)
class Reach:
    """What an environment's subsets covered: shares of the corpus, distances of their mean sketch from its, and what is
    predicted of them."""

    least: float
    most: float
    distance: Mapping[str, float]  # the farthest, by sketch; squared, with weights that add up to 1
    predicted: Mapping[str, tuple[float, float]]  # the lowest and the highest utility, by target

    @classmethod
    def of(cls, share_B: F64, distance_B: Mapping[str, F64], predicted_B: Mapping[str, F64]) -> Self:
        """Reach of a family."""
        farthest = {half: float(values.max()) for half, values in distance_B.items()}
        ends = {target: (float(values.min()), float(values.max())) for target, values in predicted_B.items()}
        return cls(float(share_B.min()), float(share_B.max()), farthest, ends)

    def predicts_beyond(self, predicted: Mapping[str, float]) -> str:
        """Which utilities the line of an interval was not fitted to, in words; empty if it was to all."""
        parts = []
        for target, (low, high) in self.predicted.items():
            slack = SIZE_SLACK * max(abs(low), abs(high))
            if target in predicted and not low - slack <= predicted[target] <= high + slack:
                ends = f"{_digits(predicted[target])}, the environment's subsets {_digits(low)} to {_digits(high)}"
                parts.append(f"{target} is predicted {ends}")
        more = [f"and {len(parts) - NAMED} more targets"] if len(parts) > NAMED else []
        return "; ".join([*parts[:NAMED], *more])

    def beyond(self, share: float | None, distance: Mapping[str, float], predicted: Mapping[str, float]) -> str:
        """In which way a subset lies outside, in words; empty if it does not.

        Args:
            share: of the corpus that it keeps; None: a mixture has no size of its own.
            predicted: utilities by target.
        """
        parts = []
        if share is not None and not self.least - SIZE_SLACK <= share <= self.most + SIZE_SLACK:
            parts.append(
                f"keeps {share:.1%} of the rows, the environment's subsets {self.least:.1%} to {self.most:.1%}"
            )
        far = [half for half, value in distance.items() if value > self.distance[half] * (1 + SIZE_SLACK)]
        if far:
            times = max(
                math.sqrt(distance[half] / self.distance[half]) if self.distance[half] else math.inf for half in far
            )
            parts.append(
                f"its mean {' and '.join(far)} sketch is {times:.1f} times as far from the corpus as any of them"
            )
        if words := self.predicts_beyond(predicted):
            parts.append(words)
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class Span:
    """One interval, in nats a token."""

    expected: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an environment says of one subset or mixture."""

    title: str
    coverage: float
    utility: Mapping[str, Span]  # realized, by target
    change: Mapping[str, Span]  # against a model trained on the whole corpus
    warnings: tuple[str, ...]

    def summary(self) -> dict[str, Any]:
        """All of it as plain JSON."""
        return {
            "what": self.title,
            "coverage": self.coverage,
            "utility": {name: asdict(span) for name, span in self.utility.items()},
            "change": {name: asdict(span) for name, span in self.change.items()},
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True, slots=True)
class Trust:
    """How far the predictions of a scorer can be trusted, as one environment shows it."""

    environment: str
    recipe: str
    seeds: tuple[int, ...]
    coverage: float
    lines: Mapping[str, UtilityLine]  # by the artifact's name of the target
    reach: Reach
    notes: tuple[str, ...]

    @classmethod
    def of(cls, scorer: Scorer, artifact: Artifact, environment: Environment, *, coverage: float = COVERAGE) -> Self:
        """Fit the targets of a scorer that the environment has.

        Args:
            scorer: bound to `artifact`; `sketches_for` names the sketches it should be prepared with.
        Raises:
            ProtocolLeakError: the environment is held out, or all of the targets are.
            EnvironmentDataError: artifact and environment do not belong together, share no target, or have too few
                subsets.
        """
        if environment.role != "dev":
            raise ProtocolLeakError(
                f"{environment.path}: is held out; intervals are fitted on development environments only, or nothing "
                "is left to test them on"
            )
        development = Development.of(environment, [artifact], targets=_theirs(environment, scorer, artifact))
        (scored,) = development.variants.values()
        parts = [_measured(scorer, scorer.sums(block.weights)) for block in scored.blocks]
        subset_ids = [name for block in scored.blocks for name in block.subset_ids]
        utilities = environment.utilities()
        order = [subset_ids.index(name) for name in utilities.subset_ids]
        predicted_BT = np.concatenate([part.utility_BT for part in parts])[order]
        own = {theirs: mine for mine, theirs in scored.renamed.items()}
        lines: dict[str, UtilityLine] = {}
        place = {name: t for t, name in enumerate(scorer.units.targets)}
        for theirs in development.targets:
            column = place[own[theirs]]
            realized_B = utilities.of(theirs).values_BSE.mean(axis=(1, 2))
            lines[own[theirs]] = UtilityLine.fit(own[theirs], predicted_BT[:, column], realized_B, coverage)
        share_B = np.concatenate([part.share_B for part in parts])
        distance_B = {half: np.concatenate([part.distance_B[half] for part in parts]) for half in scorer.sketches}
        return cls(
            environment=environment.name,
            recipe=environment.info.recipe,
            seeds=utilities.seeds,
            coverage=coverage,
            lines=lines,
            reach=Reach.of(share_B, distance_B, {name: predicted_BT[:, place[name]] for name in lines}),
            notes=tuple(_notes(scorer, environment, lines)),
        )

    @property
    def title(self) -> str:
        """What the intervals are, in words."""
        seeds = f"{len(self.seeds)} seed" + ("s" if len(self.seeds) > 1 else "")
        return (
            f"{self.coverage:.0%} intervals for a model retrained as in {self.environment} (recipe {self.recipe}, mean "
            f"of {seeds}), in nats a token"
        )

    def verdict(self, scorer: Scorer, sums: SubsetSums, *, sized: bool = True) -> Verdict:
        """What the environment says of the one subset whose sums these are.

        Args:
            sized: False for a mixture.
        """
        utility_T = scorer.score_tasks(sums)[1].utility_BE[0]
        change_T = utility_T - scorer.score_tasks(scorer.whole())[1].utility_BE[0]
        place = {name: t for t, name in enumerate(scorer.units.targets)}
        outside = self.beyond(scorer, sums, sized=sized)[0]
        warnings = (f"outside of what {self.environment} covered: {outside}",) if outside else ()
        return Verdict(
            self.title,
            self.coverage,
            {name: _span(line.at(utility_T[[place[name]]])) for name, line in self.lines.items()},
            {name: _span(line.change(change_T[[place[name]]])) for name, line in self.lines.items()},
            (*self.notes, *warnings),
        )

    def beyond(self, scorer: Scorer, sums: SubsetSums, *, sized: bool = True) -> list[str]:
        """For each subset of a block in which way it lies outside of what the environment covered; empty: inside.

        Args:
            sized: False for mixtures, whose weights say nothing of a size.
        """
        known = _measured(scorer, sums)
        return [
            self.reach.beyond(
                float(known.share_B[b]) if sized else None,
                {half: float(values[b]) for half, values in known.distance_B.items()},
                dict(zip(scorer.units.targets, known.utility_BT[b].tolist(), strict=True)),
            )
            for b in range(len(known.share_B))
        ]


def sketches_for(array_names: Sequence[str]) -> tuple[str, ...]:
    """Sketches that a scorer should be prepared with, so that distances can be told."""
    return tuple(half for half in ("hidden", "residual") if f"{half}_sketch" in array_names)


def scorer_and_trust(
    artifact: Artifact,
    protocol: ScoringProtocol,
    labels: LabelTable,
    targets: Sequence[str] | None,
    environment: Path | None,
    *,
    per_unit: bool = False,
) -> tuple[Scorer, Trust | None]:
    """A protocol bound to an artifact, and what an environment says of its predictions.

    The protocol's own calibration family standardises.

    Args:
        labels: of the artifact's rows, for a calibration family that draws by one.
        targets: None: all.
        environment: directory of a development environment; None: no intervals.
    Raises:
        GraspError: as `Scorer.prepare` and `Trust.of`.
    """
    halves = () if environment is None else sketches_for(artifact.array_names)
    family = CalibrationFamily.of(protocol, labels)
    scorer = Scorer.prepare(artifact, protocol, targets=targets, per_unit=per_unit, calibration=family, halves=halves)
    return scorer, None if environment is None else Trust.of(scorer, artifact, Environment.open(environment))


class Watcher:
    """Collects, while predictions are made, which subsets lie outside of what the environment covered."""

    def __init__(self, trust: Trust, scorer: Scorer) -> None:
        self._trust = trust
        self._scorer = scorer
        self._first: list[str] = []
        self.n_outside = 0

    def __call__(self, block: SubsetBlock, sums: SubsetSums) -> None:
        for name, words in zip(block.subset_ids, self._trust.beyond(self._scorer, sums), strict=True):
            if words:
                self.n_outside += 1
                if len(self._first) < NAMED:
                    self._first.append(f"{name}: {words}")

    @property
    def warnings(self) -> tuple[str, ...]:
        """One line a subset for the first few, and how many more there are."""
        return _warned(self._trust, self._first, self.n_outside, "subsets")


def with_intervals(table: PredictionTable, trust: Trust) -> PredictionTable:
    """Predictions with columns expected, low and high: realized utility of tasks, null for units and other targets."""
    extra = [pa.field(name, pa.float64()) for name in ("expected", "low", "high")]
    metadata = {**table.metadata, "grasp.unit.expected": trust.title, "grasp.trust": "; ".join(trust.notes)}
    schema = pa.schema([*table.schema, *extra]).with_metadata(metadata)
    return PredictionTable(schema, metadata, (_extended(part, trust, schema) for part in table.tables))


def slice_intervals(table: pa.Table, trust: Trust) -> pa.Table:
    """A table of slices with the change of realized utility if each is dropped: dropped_expected, _low, _high."""
    names, change = np.array(table["target"].to_pylist(), dtype=object), table["if_dropped"].to_numpy()
    columns = {name: np.full(len(names), np.nan) for name in ("expected", "low", "high")}
    for target, line in trust.lines.items():
        where = np.flatnonzero((names == target) & np.isfinite(change))
        found = line.change(change[where])
        for name, values in columns.items():
            values[where] = getattr(found, name)
    for name, values in columns.items():
        table = table.append_column(f"dropped_{name}", pa.array(values, from_pandas=True))
    return table.replace_schema_metadata({**(table.schema.metadata or {}), "grasp.unit.dropped": trust.title})


def slice_warnings(table: pa.Table, trust: Trust, scorer: Scorer) -> tuple[str, ...]:
    """Slices without which a prediction lies beyond those of the environment: the first few, and how many more."""
    whole = dict(zip(scorer.units.targets, scorer.score_tasks(scorer.whole())[1].utility_BE[0].tolist(), strict=True))
    without: dict[str, dict[str, float]] = {}
    for line in table.select(["value", "target", "if_dropped"]).to_pylist():
        if line["if_dropped"] is not None:
            without.setdefault(line["value"], {})[line["target"]] = whole[line["target"]] + line["if_dropped"]
    found = [f"without {value}: {words}" for value, of in without.items() if (words := trust.reach.predicts_beyond(of))]
    return _warned(trust, found[:NAMED], len(found), "slices")


def _warned(trust: Trust, first: Sequence[str], n_outside: int, what: str) -> tuple[str, ...]:
    lines = [f"outside of what {trust.environment} covered: {words}" for words in first]
    more = n_outside - len(first)
    return (*lines, *([f"... and {more:,} more {what}"] if more else []))


@dataclass(frozen=True, slots=True)
class _Measured:
    """One block of subsets."""

    utility_BT: F64
    share_B: F64
    distance_B: Mapping[str, F64]


def _measured(scorer: Scorer, sums: SubsetSums) -> _Measured:
    return _Measured(scorer.score_tasks(sums)[1].utility_BE, _share(scorer, sums), _distances(scorer, sums))


def _share(scorer: Scorer, sums: SubsetSums) -> F64:
    return sums.mass.retained_B / scorer.n_rows


def _distances(scorer: Scorer, sums: SubsetSums) -> dict[str, F64]:
    """K_cent of the kept rows with weights that add up to 1, (B,) by sketch. Source: eq:centered-mean-deviation."""

    def distance(half: str, part: SketchSums) -> F64:
        return part.geometry(sums.mass, scorer.sketches[half].totals, "retained", "mean").cent_B

    return {half: distance(half, part) for half, part in sums.sketch.items()}


def _digits(value: float) -> str:
    return f"{value:+z.1f}" if abs(value) >= 1 else f"{value:+z.2f}"


def _span(interval: Interval) -> Span:
    return Span(float(interval.expected[0]), float(interval.low[0]), float(interval.high[0]))


def _line(x_B: NDArray[np.float64], y_B: NDArray[np.float64]) -> tuple[float, float]:
    """Least squares; flat where all x are the same."""
    centred_B = x_B - x_B.mean()
    scatter = float(centred_B @ centred_B)
    slope = float(centred_B @ y_B) / scatter if scatter > 0 else 0.0
    return slope, float(y_B.mean()) - slope * float(x_B.mean())


def _theirs(environment: Environment, scorer: Scorer, artifact: Artifact) -> list[str]:
    """Environment's names of the scorer's targets, those that are held out aside."""
    loss_on = artifact.manifest.settings.get("targets", {}).get("loss_on", "completion")
    found = [
        name
        for name, info in environment.info.targets.items()
        if name.removesuffix("@all") in scorer.units.targets and info.loss_on == loss_on
    ]
    if not found:
        raise EnvironmentDataError(
            f"{environment.path}: has targets {list(environment.targets)}, asked are {list(scorer.units.targets)} with "
            f"loss_on {loss_on!r}; none is common to both"
        )
    return [name for name in found if environment.role_of(name) == "dev"] or found


def _notes(scorer: Scorer, environment: Environment, lines: Mapping[str, UtilityLine]) -> list[str]:
    notes = [
        f"{name}: realized utility does not rise with the prediction in {environment.name}: trust the interval alone"
        for name, line in lines.items()
        if line.slope <= 0
    ]
    missing = [name for name in scorer.units.targets if name not in lines]
    if missing:
        notes.append(f"no interval for {', '.join(missing)}: no development target of {environment.name}")
    selected = [name for name in scorer.protocol.selected_on or () if name.split("/")[0] == environment.name]
    if selected:
        notes.append(f"the protocol was selected on {environment.name}: its intervals are somewhat too narrow")
    return notes


def _extended(part: pa.Table, trust: Trust, schema: pa.Schema) -> pa.Table:
    names = np.array(part["target"].to_pylist(), dtype=object)
    of_task = np.ones(part.num_rows, dtype=np.bool_)
    if "unit_id" in part.column_names:
        of_task = part["unit_id"].is_null().to_numpy()
    columns = {name: np.full(part.num_rows, np.nan) for name in ("expected", "low", "high")}
    utility = part["utility"].to_numpy()
    for target, line in trust.lines.items():
        where = np.flatnonzero((names == target) & of_task)
        found = line.at(utility[where])
        for name, values in columns.items():
            values[where] = getattr(found, name)
    arrays = [*part.columns, *(pa.array(values, from_pandas=True) for values in columns.values())]
    return pa.table(arrays, schema=schema)
