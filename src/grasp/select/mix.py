"""Optimise the mixture weights of a label's values. Start with `mix`.

A mixture p gives each row of slice g the weight N p_g / n_g; the corpus is p_g = n_g / N. Shares are shares of rows.
With the mean effect m_g of a slice, the repetition law r (see `RepetitionLaw`), and the value b that any row has when
it is seen for the first time, the predicted change is

    sum_g n_g / N r(N p_g / n_g) (m_g + b) - b.

The term of slice g is concave if m_g > -b. Otherwise it is convex and is replaced by its chord between the bounds of
p_g, which is nowhere below it, so the solver's maximum is an upper bound. The mixture is optimal if these slices end at
one of their bounds; otherwise the gap to the upper bound is reported.
Shape letters: G slices, N rows, T targets, K knots of a piecewise linear function.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from grasp.api.predict import prediction_notes
from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import label_column, row_amounts, row_tokens
from grasp.errors import SettingsError
from grasp.mixtures import MEASURES, MixtureWeights, write_mixture
from grasp.predict.predictor import NEW_ROW_VALUE, RepetitionLaw
from grasp.predict.scoring_rule import ScoringProtocol
from grasp.predict.slices import LabelSlices, label_slices
from grasp.predict.subset_tables import RowIndex, write_subsets
from grasp.predict.weights import SubsetBlock
from grasp.results import first_notes
from grasp.select.budget import ROUNDING, check_share_bounds, first_few, parse_amount, parse_shares, parse_tokens
from grasp.select.change_intervals import changes_by_unit
from grasp.select.guards import CONFIDENCE, GuardOutcome, Guards, parse_guards
from grasp.select.linear_program import MixtureProblem, Segments, solve
from grasp.select.objective import OptimizationResult, SelectionObjective, repetition_law, weighted_targets
from grasp.text import as_names, plain

if TYPE_CHECKING:
    from grasp.runs.table import RunTable
    from grasp.runs.training_runs import TrainingRuns

MAX_LINES_SHOWN = 30  # rows of the printed table
MIXTURE = "mixture"  # name of the subset
MAX_REPEAT = 4.0  # data repeated more often is worth clearly less than new data: arXiv 2305.16264
SEGMENTS = 32  # segments of the piecewise linear approximation of a slice's term
TINY = 1e-12  # smallest divisor
MAX_RELATIVE_GAP = 1e-3  # relative error of that approximation; a larger gap to the upper bound is reported


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Mixture(OptimizationResult):
    """Current and proposed shares of a label's values.

    Attributes:
        table: columns value, expression, rows, now, proposed, times_as_often; one row per label value.
    """

    kind = "mixture"

    label: str
    slices: LabelSlices
    guards: Sequence[GuardOutcome]

    def write_weights(self, path: Path | str) -> None:
        """Write the weight of every row as one subset, `mixture`, that `predict --subsets` reads."""
        factor_1G = self.table["times_as_often"].to_numpy()[None]
        block = SubsetBlock((MIXTURE,), self.slices.weights(factor_1G))
        index = RowIndex.from_parquet(self.artifact.rows_path)
        corpus = self.artifact.manifest.fingerprints.get("corpus", "")
        write_subsets(Path(path), [block], index, weights=True, corpus=corpus)

    def export(self, path: Path | str, form: str) -> str:
        """Write the weights in the format of a training tool and return a line that describes the file.

        Args:
            form: name of a format, e.g. yaml or csv; see `grasp.mixtures`.
        Raises:
            SettingsError: the format is unknown, or the path does not have its suffix.
        """
        slices = self.slices
        size_G = {
            measure: np.bincount(slices.codes_N, row_amounts(self.artifact, measure, slices.codes_N)).astype(np.float64)
            for measure in MEASURES
        }
        times_G = self.table["times_as_often"].to_numpy()
        return write_mixture(MixtureWeights(self.label, slices.names, size_G, times_G), path, form)

    def summary(self) -> dict[str, Any]:
        """Return the result as JSON data."""
        parts = {"label": self.label, "slices": self.table.to_pylist(), "guards": list(map(asdict, self.guards))}
        return super().summary() | parts

    def __repr__(self) -> str:
        ordered = self.table.drop_columns(["expression"]).sort_by([("proposed", "descending")])
        rest = ordered.slice(MAX_LINES_SHOWN)
        lines = [plain(self.headline), self._shown_table("", ordered.slice(0, MAX_LINES_SHOWN))]
        if len(rest):
            now, proposed = (sum(rest[name].to_pylist()) for name in ("now", "proposed"))
            lines.append(f"... and {len(rest):,} more values: {now:.1%} now, {proposed:.1%} proposed in total")
        return "\n".join([*lines, self._shown_changes(), *map(plain, first_notes(self.notes))])


def mix(
    artifact: ArtifactReader,
    by: str,
    target: str | Sequence[str] | Mapping[str, float] | None = None,
    *,
    not_worse: str | Sequence[str] | None = None,
    tolerance: float = 0.0,
    floor: str | Sequence[str] = (),
    cap: str | Sequence[str] = (),
    max_repeat: float = MAX_REPEAT,
    train_tokens: str | float | None = None,
    runs: "TrainingRuns | RunTable | Path | str | None" = None,
    distance: str | None = None,
    protocol: ScoringProtocol | Path | str | None = None,
    cautious: bool = False,
) -> Mixture:
    """Optimise the mixture weights of a label's values for the targets.

    The amount of training data stays the same.

    Args:
        artifact: artifact of the corpus.
        by: label whose values are weighted.
        target: target, or several with weights, e.g. sciq=2,openbookqa=1. Default: the only target.
        not_worse: other targets, separated by commas, that must not become worse, with 90 % probability.
        tolerance: how much worse they may become, in the unit of the changes, e.g. 0.01.
        floor: minimum share of the mixture, e.g. Games:5%, or 1% for every value; 0% allows a value to be dropped.
        cap: maximum share of the mixture, e.g. Games:20%, or 10% for every value.
        max_repeat: maximum number of times that a row is seen; if `train_tokens` repeat the corpus, relative to the
            current mixture. A value retains at least 1 / `max_repeat` of its share.
        train_tokens: length of the training run in tokens, e.g. 100B; repeated tokens have diminishing value. Default:
            the tokens of the corpus.
        runs: retrained or imported runs; changes are then in their unit, with intervals.
        distance: maximum share of the data that is moved between values, e.g. 30%.
        protocol: protocol to predict with; only its additive part. Default: the built-in one.
        cautious: maximise the lower confidence bound instead of the mean (requires `runs`).
    Raises:
        ProtocolError: an unknown target.
        SettingsError: no mixture satisfies the floors, caps and distance, or they are numbers of rows, not shares.
    """
    targets = weighted_targets(target, artifact.targets)
    guarded = parse_guards(not_worse, tolerance, tuple(artifact.targets))
    check_max_repeat(max_repeat)
    tokens_N = row_tokens(artifact)
    column = label_column(artifact, by, "by")
    slices = label_slices(column, tokens_N)
    tokens = None if train_tokens is None else parse_tokens(train_tokens)
    epochs = repetition_law(tokens, tokens_N).epochs or 1.0
    max_distance = None
    if distance is not None:
        amount = parse_amount(distance, "distance", "30%")
        if not amount.is_share or amount.unit is not None:
            raise SettingsError(f"distance: got {distance!r}, expected a share, e.g. 30%")
        max_distance = amount.value
    current_G = slices.rows_G / slices.rows_G.sum()
    low_G, high_G = _bounds(slices, floor, cap, max_repeat, min(1.0, epochs), max_distance)
    all_targets = dict.fromkeys([*targets, *guarded], 0.0) | dict(targets)
    objective = SelectionObjective.from_artifact(artifact, protocol, all_targets, tokens, runs, cautious=cautious)
    problem = MixtureProblem(low_G, high_G, current_G, max_distance)
    problem, range_note = _within_runs(problem, objective, slices)
    guards = Guards(guarded, tolerance, _guarded_changes(objective, slices, guarded)) if guarded else Guards()
    p_G, gap, outcomes = _optimize(objective, slices, problem, guards)
    factor_G = p_G / current_G
    weights = slices.weights(factor_G[None])
    changes = objective.evaluate(MIXTURE, weights, "the current mixture", slices.codes_N)
    value = float(objective.budget_predictor.change(weights)[0] @ objective.weights_T)
    optimum = "the optimum predicted by the runs" if objective.by_runs else "optimal"
    if gap > MAX_RELATIVE_GAP * abs(value):
        optimum += f" (up to a gap of {gap:.3f})"
    repetition = f"no row is seen more than {epochs * float(factor_G.max()):.2g} times"
    if tokens is None:
        messages = [f"{repetition} in one epoch"]
    else:
        budget = f"{tokens:,.0f} training tokens, {epochs:.2g} epochs"
        messages = [f"value {value:+z.3f}: the change including the effect of repetition in {budget}; {repetition}"]
    messages = [*(outcome.note for outcome in outcomes), *messages, *changes.notes]
    if objective.by_runs:
        messages.append(f"the mixture maximises the change predicted by the runs{range_note}")
    messages += [
        f"no row is seen more than {max_repeat:g} times, and each value retains at least 1/{max_repeat:g} of its share "
        "(--max-repeat); --floor VALUE:0% allows a value to be dropped",
        "now and proposed are shares of rows; shares of tokens differ if rows differ in length",
    ]
    if column.note:
        messages.append(column.note)
    if slices.n_grouped:
        messages.append(f"{slices.n_grouped:,} small values share one slice; their proportions to each other are fixed")
    messages += prediction_notes(objective.predictor, objective.run_model)
    moved = 0.5 * float(np.abs(p_G - current_G).sum())
    params = {
        "by": by,
        "targets": dict(targets),
        "max_repeat": max_repeat,
        "train_tokens": tokens,
        "floor": list(as_names(floor)),
        "cap": list(as_names(cap)),
        "distance": distance,
    }
    params |= {"not_worse": list(guarded), "tolerance": tolerance} if guarded else {}
    params |= {"cautious": True} if cautious else {}
    return Mixture(
        pa.table(
            {
                "value": pa.array(slices.names, pa.string()),
                "expression": pa.array([entry.expression for entry in slices.slices], pa.string()),
                "rows": pa.array(slices.rows_G),
                "now": pa.array(current_G),
                "proposed": pa.array(p_G),
                "times_as_often": pa.array(factor_G),
            }
        ),
        changes.verdict
        + f"mixture by {slices.label}: {100 * moved:.1f} % of the data are reallocated; {optimum} within the bounds",
        tuple(messages),
        **objective.result_fields(changes, value, params),
        label=slices.label,
        slices=slices,
        guards=outcomes,
    )


def _guarded_changes(
    objective: SelectionObjective, slices: LabelSlices, names: Sequence[str]
) -> Callable[[F64], tuple[F64, F64]]:
    """Return a function of mixtures (B, G): the changes of targets, and their lower bounds, (B, K) each.

    The variance over questions is that of the means of slices, and that over rows is `change_intervals.row_errors`.
    """
    predictor, current_G = objective.predictor, slices.rows_G / slices.rows_G.sum()
    columns = [predictor.units.targets.index(name) for name in names]

    def by_runs(p_BG: F64) -> tuple[F64, F64]:
        assert objective.run_model is not None
        predicted = objective.run_model.predict(slices.weights(p_BG / current_G))
        narrower = NormalDist().inv_cdf(CONFIDENCE) / NormalDist().inv_cdf(0.95)  # its intervals cover 90 % two-sided
        change_BK = predicted.change_BT[:, columns]
        return change_BK, change_BK - narrower * (change_BK - predicted.low_BT[:, columns])

    if objective.run_model is not None:
        return by_runs
    unit_GE = changes_by_unit(objective.artifact, predictor, slices.each)
    stops = np.cumsum(predictor.units.counts_T)
    of_target = [slice(stops[t] - predictor.units.counts_T[t], stops[t]) for t in columns]
    effect_NK = np.asarray(predictor.effect_NT, np.float64)[:, columns]
    total_GK, square_GK = (
        np.stack([np.bincount(slices.codes_N, value_N) for value_N in values_NK.T], axis=1)
        for values_NK in (effect_NK, effect_NK**2)
    )
    rows_G1 = slices.rows_G[:, None].astype(np.float64)
    variance_GK = (square_GK / rows_G1 - (total_GK / rows_G1) ** 2) / rows_G1  # of the mean of a slice

    def by_relevance(p_BG: F64) -> tuple[F64, F64]:
        change_BK = predictor.change(slices.weights(p_BG / current_G))[:, columns]
        unit_BE = p_BG @ unit_GE
        over_units_BK = np.stack([unit_BE[:, s].var(axis=1) / (s.stop - s.start) for s in of_target], axis=1)
        over_rows_BK = (p_BG - current_G) ** 2 @ variance_GK
        return change_BK, change_BK - NormalDist().inv_cdf(CONFIDENCE) * np.sqrt(over_units_BK + over_rows_BK)

    return by_relevance


def check_max_repeat(max_repeat: float) -> None:
    """Check the maximum number of times that a row is repeated.

    Raises:
        SettingsError: it is below 1.
    """
    if not 1 <= max_repeat < np.inf:
        raise SettingsError(f"max_repeat: got {max_repeat:g}, expected a number of repetitions of 1 or more")


def _within_runs(
    problem: MixtureProblem, objective: SelectionObjective, slices: LabelSlices
) -> tuple[MixtureProblem, str]:
    """Keep shares within the range of the runs, as `runs mix` does, where other bounds allow it; also return a note."""
    if objective.run_model is None or not objective.by_runs or slices.label not in objective.run_model.labels:
        return problem, ""
    run_RG = objective.run_model.row_shares(slices.label, slices.rows_G)
    run_low_G, run_high_G = run_RG.min(axis=0), run_RG.max(axis=0)
    low_G, high_G = (np.clip(end_G, problem.low_G, problem.high_G) for end_G in (run_low_G, run_high_G))
    moved = max(np.maximum(low_G - problem.current_G, 0.0).sum(), np.maximum(problem.current_G - high_G, 0.0).sum())
    if not low_G.sum() <= 1.0 <= high_G.sum() or (problem.distance is not None and moved > problem.distance):
        return problem, "; floors, caps or the distance exclude the range of their shares"
    outside = np.flatnonzero((problem.low_G > run_high_G + ROUNDING) | (problem.high_G < run_low_G - ROUNDING))
    excepted = f", except {first_few([slices.names[g] for g in outside])}" if len(outside) else ""
    return replace(problem, low_G=low_G, high_G=high_G), f", within the range of their shares of rows{excepted}"


def _optimize(
    objective: SelectionObjective, slices: LabelSlices, problem: MixtureProblem, guards: Guards
) -> tuple[F64, float, list[GuardOutcome]]:
    """Return the shares with the highest predicted change, an upper bound on its distance to the optimum, and guards.

    By relevance, repetition has diminishing value. If there are runs, their prediction decides, see
    `SelectionObjective.by_runs`; with runs or guards the distance to the optimum is unknown, and 0 is returned.
    """
    current_G, law = problem.current_G, objective.budget_predictor.repetition_law
    effect_G = (objective.predictor.sums(slices.each, ()).effect_BT @ objective.weights_T) / slices.rows_G
    row_value_G = effect_G + NEW_ROW_VALUE  # of a row of each slice when it is seen for the first time: m_g + b
    segments = _segments(law, row_value_G, problem)
    p_G = solve(replace(problem, segments=segments))

    def value(p_BG: F64) -> F64:
        if objective.by_runs:
            return objective.predicted_by_runs(slices.weights(p_BG / current_G))
        # sum_g n_g / N r(N p_g / n_g) (m_g + b)
        return np.asarray((current_G * law(p_BG / current_G)) @ row_value_G)

    if guards.names or objective.by_runs:
        p_G, outcomes = guards.optimize(problem, value, [p_G, current_G])
        return p_G, 0.0, outcomes
    return p_G, max(segments.value(p_G) - float(value(p_G[None])[0]), 0.0), []


def _segments(law: RepetitionLaw, row_value_G: F64, problem: MixtureProblem) -> Segments:
    """Return the value of each slice as a piecewise linear function of its share; for a convex term, its chord.

    One knot is where repetition begins, as the law has a kink there.
    """
    low_G, high_G, current_G = problem.low_G, problem.high_G, problem.current_G
    steps = np.linspace(0.0, 1.0, SEGMENTS)
    # share at which every row of the slice is seen once
    once_G1 = np.clip(current_G / max(law.epochs or 1.0, TINY), low_G, high_G)[:, None]
    knots_GK = np.sort(np.concatenate([low_G[:, None] + (high_G - low_G)[:, None] * steps, once_G1], axis=1), axis=1)
    value_GK = (row_value_G * current_G)[:, None] * law(knots_GK / current_G[:, None])
    position_GK = np.divide(knots_GK - knots_GK[:, :1], np.maximum(high_G - low_G, TINY)[:, None])
    chord_GK = value_GK[:, :1] + (value_GK[:, -1:] - value_GK[:, :1]) * position_GK
    return Segments(knots_GK, np.where(row_value_G[:, None] < 0, chord_GK, value_GK))


def _bounds(
    slices: LabelSlices,
    floor: str | Sequence[str],
    cap: str | Sequence[str],
    max_repeat: float,
    epochs: float,
    distance: float | None,
) -> tuple[F64, F64]:
    """Return the lower and upper bound of each share, (G,): floors and caps, and `max_repeat` for other values."""
    names, current_G = slices.names, slices.rows_G / slices.rows_G.sum()
    requested_G, cap_G = parse_shares(floor, cap, slices.label, names, slices.n_grouped)
    floor_G, cap_G = np.nan_to_num(requested_G), np.nan_to_num(cap_G, nan=1.0)
    # a requested bound overrides a default one: a cap the default lower bound, a floor the default upper bound
    default_low_G = current_G / max_repeat
    low_G = np.where(np.isnan(requested_G), default_low_G, floor_G)
    low_G = np.where(low_G > 0, np.maximum(low_G, default_low_G), 0.0)  # 0 %: may be dropped
    low_G = np.minimum(low_G, np.maximum(cap_G, floor_G))
    high_G = np.minimum(cap_G, np.maximum(max_repeat * current_G / epochs, floor_G))

    # satisfying the bounds may move more data than the distance allows
    up_G, down_G = np.maximum(low_G - current_G, 0.0), np.maximum(current_G - high_G, 0.0)
    min_distance = max(float(up_G.sum()), float(down_G.sum()))
    problems = []
    if distance is not None and min_distance > distance + ROUNDING:
        worst = names[int(np.argmax(np.maximum(up_G, down_G)))]
        problems.append(f"they move {min_distance:.1%} of the data, mostly {worst}; the distance allows {distance:.1%}")
    check_share_bounds(low_G, high_G, names, problems)
    return low_G, high_G
