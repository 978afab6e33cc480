"""Runs without an artifact: what a mixture would give, which mixture is best, and which to train next.

Runs by shares of a label are learned from; the answers are in the metrics' own units. `propose_runs` picks mixtures by
what they are expected to teach. With the joint posterior of the learned predictor at candidates (mean m, covariance S)
a run of candidate x moves the means by S_x / sqrt(S_xx + noise) times a standard normal number, so

    best:    E max(m + S_x z / sqrt(S_xx + noise)) - max m, by quadrature: what the best gains (the knowledge gradient)
    values:  sum_g (d_g' S_x)^2 / (S_xx + noise): what it takes off the variance of d_g, the effects of values

and the next one is picked given that the first is run. Shape letters: R runs, B mixtures, G values, T metrics.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy.sparse import csr_array

from grasp.api.retrain import Opened
from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import label_column, row_tokens
from grasp.errors import RunsError, SettingsError
from grasp.predict.families import draw_dirichlet_shares
from grasp.predict.slices import label_slices
from grasp.predict.subset_tables import RowIndex, write_subsets
from grasp.results import Result
from grasp.runs.alignment import row_weights
from grasp.runs.calibration import COVERAGE
from grasp.runs.gaussian_process import GaussianProcess, SubsetFeatures
from grasp.runs.import_runs import read_mixtures
from grasp.runs.retrained import RetrainedRuns
from grasp.runs.table import NAMED, RESULTS_SCHEMA, TRAINED_SCHEMA, RunsInfo, RunTable, open_runs
from grasp.seeds import stream
from grasp.select.budget import by_value, describe_value, parse_bounds, parse_tokens
from grasp.select.mix import MAX_REPEAT
from grasp.select.quadratic_program import Programme, frank_wolfe
from grasp.text import listed

Runs = RunTable | Path | str

CANDIDATES = 1_000
TRIED = 250  # of the candidates: those that may be best, and some of the others
MOST = TRIED // 2  # so many different ones are among them for certain
NODES = 21  # of the quadrature
SLACK = 0.005  # of a share, beyond those of the runs
EXPLORING = 0.5  # part of the mixtures of which more is expected than of one that is proposed to explore
HALVINGS = 80
STEPS = 20  # of the line on which the run that settles a mixture is looked for
SHARES_SHOWN = 6
CLIMBS = 8  # of the best runs, that the best mixture is looked for from


@dataclass(frozen=True, slots=True)
class MixtureModel:
    """Runs by shares, and what was learned of every metric and, last, of their weighted mean, the aim."""

    table: RunTable
    share_RG: F64
    process: GaussianProcess
    weights_T: F64
    sign_T: F64  # -1: less is better

    @classmethod
    def from_runs(cls, runs: Runs, metric: str | Sequence[str] | Mapping[str, float] | None = None) -> Self:
        """Learn from runs.

        Args:
            metric: one, several, or metrics and weights; None: all of them alike.
        Raises:
            RunsError: not imported runs by shares, no such metric, too few runs, or runs all alike.
        """
        table = open_runs(runs)
        if not isinstance(table, RunTable) or table.info.kind != "shares":
            raise RunsError(
                f"{table.name}: mixtures alone are learned from runs by shares of a label; import them with "
                "grasp runs import MIXTURES METRICS --label LABEL"
            )
        selected = metric or table.metrics
        weight_of = (
            dict(selected) if isinstance(selected, Mapping) else dict.fromkeys(listed(selected, table.metrics), 1.0)
        )
        unknown = [name for name in weight_of if name not in table.metrics]
        if unknown or not sum(weight_of.values()) > 0 or min(weight_of.values()) < 0:
            raise RunsError(
                f"{table.name}: got the metrics {weight_of}, expected some of {', '.join(table.metrics[:NAMED])} ... "
                "with weights of 0 or more"
            )
        weights_T = np.array([weight_of.get(name, 0.0) for name in table.metrics]) / sum(weight_of.values())
        utility_RST = table.utility_RST()
        objective_RS1 = (utility_RST @ weights_T)[:, :, None]
        share_RG = table.weights_RG()
        features = SubsetFeatures.from_shares(share_RG, len(weights_T) + 1)
        process = GaussianProcess.fit(features, np.concatenate([utility_RST, objective_RS1], axis=2))
        sign_T = np.array([1.0 if table.info.metrics[name] == "higher" else -1.0 for name in table.metrics])
        return cls(table, share_RG, process, weights_T, sign_T)

    @property
    def notes(self) -> tuple[str, ...]:
        size = f" of size {self.table.sizes[0]}" if self.table.sizes else ""
        return (f"{COVERAGE:.0%} intervals, for the mean of many seeds{size}",)

    def features(self, share_BG: F64) -> SubsetFeatures:
        return SubsetFeatures.from_shares(share_BG, len(self.weights_T) + 1)

    def predict_objective(self, share_BG: F64, cautious: float = 0.0) -> F64:
        """Expected weighted mean less so many standard deviations, (B,); higher is better."""
        mean_BT, spread_BT = self.process.predict(self.features(share_BG))
        return np.asarray(mean_BT[:, -1] - cautious * spread_BT[:, -1])

    def lines(self, names: Sequence[str], share_BG: F64) -> pa.Table:
        """mixture, metric, expected, low, high: in the metric's own unit."""
        mean_BT, spread_BT = (values[:, :-1] for values in self.process.predict(self.features(share_BG)))
        half_BT = self.process.quantile(COVERAGE) * spread_BT
        columns = np.flatnonzero(self.weights_T)
        b, t = (index.reshape(-1) for index in np.meshgrid(np.arange(len(names)), columns, indexing="ij"))
        value = np.where(self.refused(share_BG)[:, :-1], np.nan, self.sign_T * mean_BT)[b, t]
        return pa.table(
            {
                "mixture": pa.array(np.array(names, object)[b], pa.string()),
                "metric": pa.array(np.array(self.table.metrics, object)[t], pa.string()),
                "expected": pa.array(value, from_pandas=True),
                "low": pa.array(value - half_BT[b, t], from_pandas=True),
                "high": pa.array(value + half_BT[b, t], from_pandas=True),
            }
        )

    def beyond(self, share_BG: F64) -> F64:
        """(B, G) shares beyond those of any run, above 0 where a mixture has more or less of a value."""
        return np.asarray(np.maximum(share_BG - self.share_RG.max(axis=0), self.share_RG.min(axis=0) - share_BG))

    def refused(self, share_BG: F64) -> NDArray[np.bool_]:
        """(B, T + 1) whether a mixture lies outside the runs, so far that they say nothing of it."""
        outside_B1 = (self.beyond(share_BG) > SLACK).any(axis=1, keepdims=True)
        return outside_B1 & (self.process.relative_uncertainty(self.features(share_BG), COVERAGE) > 1.0)

    def settling_run(self, share_G: F64) -> F64:
        """(G,) the run nearest to the mean of the runs after which a mixture is not refused.

        Looked for on the straight line from the mean to the mixture; the mixture itself, if no other is enough.
        """
        mixture = self.features(share_G[None])
        task = int(
            np.argmax(self.process.relative_uncertainty(mixture, COVERAGE)[0] * np.append(self.weights_T > 0, True))
        )
        mean_G = self.share_RG.mean(axis=0)
        line_BG = mean_G + np.linspace(0.0, 1.0, STEPS + 1)[1:, None] * (share_G - mean_G)
        after_B = self.process.relative_uncertainty_after(mixture, self.features(line_BG), task, COVERAGE)
        enough_B = after_B <= 1.0
        return np.asarray(line_BG[int(np.argmax(enough_B)) if enough_B.any() else -1])


@dataclass(frozen=True, eq=False, repr=False)
class Proposal(Result):
    """Mixtures to train; printed with one row per value."""

    def _shown(self) -> tuple[list[str], list[list[str]]]:
        mixtures, settles, *shares = (column.to_pylist() for column in self.table.columns)
        lines = [
            [name, *(f"{share:.1%}" for share in column)]
            for name, column in zip(self.table.column_names[2:], shares, strict=True)
        ]
        return ["", *mixtures], [["settles", *(f"{value:.2g}" for value in settles)], *lines]

    def _below(self) -> Sequence[str]:
        return self.notes


def predict_runs(runs: Runs, mixtures: Path | str | pa.Table, metric: str | Sequence[str] | None = None) -> Result:
    """What would these mixtures give? By runs alone, without an artifact.

    The interval of a metric holds nine of ten runs. Far outside of what was run there is no number, but the run that
    would settle it.

    Args:
        runs: imported runs, see `grasp runs import`.
        mixtures: table with one row per mixture and one column per value of the label; shares add up to 1.
        metric: metrics, separated by commas. Default: all of them.
    Raises:
        RunsError: see `MixtureModel.from_runs`; values that no run has; shares that do not add up to 1.
    """
    model = MixtureModel.from_runs(runs, metric)
    names, share_BG = read_mixtures(mixtures, model.table.values)
    requested_T = np.append(model.weights_T > 0, False)
    refused_B = (model.refused(share_BG) & requested_T).any(axis=1)
    notes = [
        *_outside(model, names, share_BG, ~refused_B, "outside of what the runs covered, so the interval is wider"),
        *_outside(model, names, share_BG, refused_B, "no number, too far outside of what the runs covered"),
    ]
    for b in np.flatnonzero(refused_B)[:NAMED].tolist():
        run_G = model.settling_run(share_BG[b])
        shares = ", ".join(f"{model.table.values[g]} {run_G[g]:.0%}" for g in np.argsort(-run_G)[:SHARES_SHOWN])
        more = f" and {len(run_G) - SHARES_SHOWN} more" if len(run_G) > SHARES_SHOWN else ""
        notes.append(f"a run that would settle {names[b]}: {shares}{more}")
    headline = f"{len(names):,} mixtures, by {len(model.table):,} runs"
    return Result(model.lines(names, share_BG), headline, (*notes, *model.notes), signs=False)


def _outside(
    model: MixtureModel, names: Sequence[str], share_BG: F64, among_B: NDArray[np.bool_], what: str
) -> list[str]:
    """One sentence on the mixtures that give a value more, or less, than any run did; none if there are none."""
    low_G, high_G = model.share_RG.min(axis=0), model.share_RG.max(axis=0)
    beyond_BG = model.beyond(share_BG)
    outside = []
    for b in np.flatnonzero(among_B & (beyond_BG > SLACK).any(axis=1)).tolist():
        g = int(np.argmax(beyond_BG[b]))
        covered = f"in the runs {low_G[g]:.0%} to {high_G[g]:.0%}"
        outside.append(f"{names[b]} ({model.table.values[g]} {share_BG[b, g]:.0%}, {covered})")
    more = f" and {len(outside) - NAMED:,} more" if len(outside) > NAMED else ""
    return [f"{what}: {'; '.join(outside[:NAMED])}{more}"] if outside else []


def mix_runs(
    runs: Runs, metric: str | Sequence[str] | Mapping[str, float] | None = None, *, cautious: float = 0.0
) -> Result:
    """Which mixture is best? By runs alone, for the mean of the metrics.

    No value gets more, or less, than in any run.

    Args:
        runs: imported runs, see `grasp runs import`.
        metric: metrics, separated by commas. Default: all of them. In Python also metrics and weights.
        cautious: take so many standard deviations off: the little known counts as worse.
    """
    model = MixtureModel.from_runs(runs, metric)
    low_G, high_G = model.share_RG.min(axis=0), model.share_RG.max(axis=0)
    programme = Programme(np.zeros(len(low_G)), low_G, high_G, model.share_RG.mean(axis=0))
    starts = model.share_RG[np.argsort(-model.predict_objective(model.share_RG, cautious), kind="stable")[:CLIMBS]]
    best_G = frank_wolfe(programme, lambda share_BG: model.predict_objective(share_BG, cautious), list(starts))
    expected_R = model.process.predict(model.features(model.share_RG))[0][:, -1]
    run_G = model.share_RG[int(np.argmax(expected_R))]
    shares = pa.table(
        {
            "value": pa.array(model.table.values, pa.string()),
            "mean_of_runs": model.share_RG.mean(axis=0),
            "best_run": run_G,
            "proposed": best_G,
        }
    ).sort_by([("proposed", "descending")])
    messages = [
        f"{line['metric']}: {line['mixture']} {line['expected']:.4g} ({line['low']:.4g} to {line['high']:.4g})"
        for line in model.lines(["proposed", "best run"], np.stack([best_G, run_G])).to_pylist()
    ]
    headline = f"the best mixture by {len(model.table):,} runs of {model.table.name}"
    return Result(shares, headline, (*messages, *model.notes), signs=False)


def propose_runs(
    runs: Runs | RetrainedRuns,
    metric: str | Sequence[str] | Mapping[str, float] | None = None,
    *,
    count: int = 4,
    decide: str = "best",
    floor: str | Sequence[str] = (),
    cap: str | Sequence[str] = (),
    max_repeat: float = MAX_REPEAT,
    train_tokens: str | float | None = None,
    subsets: Path | str | None = None,
    seed: int = 0,
    artifact: Opened | None = None,
) -> Result:
    """Which mixtures should be trained next, to decide with the fewest runs?

    Args:
        runs: imported runs, see `grasp runs import`; or, with an artifact, retrained ones.
        metric: metrics, separated by commas. Default: all of them. In Python also metrics and weights.
        count: mixtures to propose.
        decide: what is to be decided. best: which mixture is; values: what each value is worth.
        floor: minimum share in every proposal, e.g. web:5%, or 1% of each value.
        cap: maximum share in every proposal, e.g. web:40%, or 30% of each value.
        max_repeat: with an artifact, no share for which a value would be repeated more often.
        train_tokens: tokens that the proposed runs will be trained on, e.g. 100B, for `max_repeat`. Default: as many as
            the corpus has.
        subsets: the mixtures as weights of rows, for `grasp retrain` --set subsets=FILE.
        seed: seed of the mixtures that are looked at.
        artifact: of the corpus; for retrained runs, whose shares are those of the label that they were drawn by, for
            `subsets`, and for the sizes that `max_repeat` needs.
    Returns:
        One row per mixture, in the order in which to train them: mixture, settles, and the share of each value.
        For `best`, settles is by how much the best mixture is expected to become better, in the unit of the metric; for
        `values` it is the part of the uncertainty of all values that the run takes away. A note names the mixtures that
        are proposed to explore: the runs expect less of them than of most.
    Raises:
        SettingsError: floors and caps that no mixture satisfies, or in numbers of rows; a training so long that some
            value must be repeated more often than `max_repeat`.
    """
    if decide not in ("best", "values") or not 1 <= count <= MOST:
        raise SettingsError(
            f"propose: got decide {decide!r} and {count} runs, expected best or values, and 1 to {MOST} runs; train "
            "some, import them, and ask again"
        )
    run_table = open_runs(runs)
    if isinstance(run_table, RetrainedRuns):
        if artifact is None:
            raise SettingsError(f"propose: {run_table.path} holds retrained subsets; name the artifact of their corpus")
        run_table = runs_by_shares(run_table, artifact.files)
    model = MixtureModel.from_runs(run_table, metric)
    rng = stream(seed, "propose", len(model.table))
    even_G = model.share_RG.mean(axis=0)
    label, values = model.table.info.label, model.table.values
    largest_G = np.ones(len(values))
    notes = ["no limit on repetition: sizes of the values are unknown without an artifact (--art); see --cap"]
    if artifact is not None:
        rows = isinstance(open_runs(runs), RetrainedRuns)
        largest_G, notes = repetition_caps(artifact.files, label, values, max_repeat, train_tokens, rows=rows)
    low_G, high_G = share_bounds(label, values, floor, cap, largest_G)
    share_BG = project_to_bounds(
        np.stack([draw_dirichlet_shares(rng, np.maximum(even_G, 1e-3)) for _ in range(CANDIDATES)]), low_G, high_G
    )
    picked, settles = most_informative(model.process, model.features(share_BG), count, decide, rng)
    names = [f"next-{k + 1}" for k in range(len(picked))]
    proposal = model.table
    if subsets is not None:
        if artifact is None:
            raise SettingsError("propose: subsets are of the rows of an artifact; name it")
        files, trained = artifact.files, _trained(names, proposal.values, share_BG[picked])
        blocks, _ = row_weights(replace(proposal, trained=trained), files)
        corpus = files.manifest.fingerprints.get("corpus", "")
        write_subsets(Path(subsets), blocks, RowIndex.from_parquet(files.rows_path), weights=True, corpus=corpus)
    if decide == "best":
        what = "the best mixture"
        settled = "by how much the best mixture is expected to become better through this run, in the metric's unit"
    else:
        what = f"what each {proposal.info.label} is worth"
        settled = "the part of what is uncertain of all values that this run takes away, in the metric's unit"
    columns = {name: share_BG[picked, g] for g, name in enumerate(proposal.values)}
    expected_B = model.predict_objective(share_BG)
    better_K = [float((expected_B > expected_B[b]).mean()) for b in picked]
    exploring = [f"{name} ({better:.0%})" for name, better in zip(names, better_K, strict=True) if better > EXPLORING]
    if exploring:
        more = f" and {len(exploring) - NAMED:,} more" if len(exploring) > NAMED else ""
        notes.append(
            "exploration, proposed for what it teaches and not for its result: "
            f"{', '.join(exploring[:NAMED])}{more}; in brackets the part of the mixtures of which the runs expect more"
        )
    return Proposal(
        pa.table({"mixture": names, "settles": settles} | columns),
        f"{len(picked)} mixtures that say most of {what}, by {len(run_table):,} runs; train the first one first",
        (f"settles: {settled}", *notes, *model.notes),
        signs=False,
    )


def repetition_caps(
    artifact: ArtifactReader,
    label: str | None,
    values: Sequence[str],
    max_repeat: float,
    train_tokens: str | float | None,
    *,
    rows: bool,
) -> tuple[F64, list[str]]:
    """(G,) largest shares for which no value is repeated more than `max_repeat` times, and a sentence on them.

    Args:
        rows: shares are of rows, not of tokens.
    Raises:
        SettingsError: `max_repeat` is below 1, or the training is so long that something must be repeated more often.
    """
    if not 1 <= max_repeat < np.inf:
        raise SettingsError(f"max_repeat: got {max_repeat:g}, expected 1 or more: how often a row may be seen")
    assert label is not None
    column = label_column(artifact, label)
    slices = label_slices(column, row_tokens(artifact), most=len(column.values))
    size_of = {entry.name: entry.rows if rows else entry.tokens for entry in slices.slices}
    total = sum(entry.tokens for entry in slices.slices)
    epochs = 1.0 if train_tokens is None else parse_tokens(train_tokens) / total
    size_G = np.array([size_of.get(value, 0) for value in values], dtype=np.float64)
    if not size_G.any():
        raise SettingsError(
            f"propose: {artifact.path} has none of the values {', '.join(values[:NAMED])} ... of {label}"
        )
    largest_G = np.minimum(max_repeat * size_G / sum(size_of.values()) / epochs, 1.0)
    if largest_G.sum() < 1.0:
        raise SettingsError(
            f"max_repeat, train_tokens: {epochs:.3g} epochs of the corpus repeat some value more than {max_repeat:g} "
            "times, whatever the mixture; raise --max-repeat or train on fewer tokens"
        )
    length = "as long as the corpus" if train_tokens is None else f"of {epochs:.2g} times the corpus"
    return largest_G, [f"no value is seen more than {max_repeat:g} times in a training {length} (--max-repeat)"]


def share_bounds(
    label: str | None, values: Sequence[str], floor: str | Sequence[str], cap: str | Sequence[str], largest_G: F64
) -> tuple[F64, F64]:
    """(G,) smallest and largest shares.

    Raises:
        SettingsError: a bound in rows or of an unknown value, or bounds that no mixture satisfies.
    """
    bounds_G = []
    for flag, texts, unbounded in (("floor", floor, 0.0), ("cap", cap, 1.0)):
        bounds = parse_bounds(texts, flag)
        for value, amount in bounds.items():
            if not amount.is_share or amount.unit is not None:
                raise SettingsError(f"{flag} {describe_value(value)}: a mixture has shares; expected e.g. web:5%")
        amounts = by_value(bounds, flag, label or "mixture", values)
        bounds_G.append(np.array([unbounded if amount is None else amount.value for amount in amounts]))
    low_G, high_G = bounds_G[0], np.minimum(bounds_G[1], largest_G)
    for g in np.flatnonzero(low_G > high_G)[:1].tolist():
        raise SettingsError(
            f"floor, cap: {values[g]} has a floor of {low_G[g]:.1%} and at most {high_G[g]:.1%} (--cap, --max-repeat)"
        )
    if low_G.sum() > 1.0 or high_G.sum() < 1.0:
        raise SettingsError(
            f"floor, cap: no mixture satisfies them: floors add up to {low_G.sum():.1%}, caps to {high_G.sum():.1%}"
        )
    return low_G, high_G


def project_to_bounds(share_BG: F64, low_G: F64, high_G: F64) -> F64:
    """(B, G) mixtures clip(m p, low, high), with the factor m of each mixture for which they add up to 1."""
    tiny = np.finfo(np.float64).eps
    share_BG = share_BG + tiny  # a share of 0 may grow if nothing else can
    high_B1 = np.full((len(share_BG), 1), -2 * np.log(tiny))
    low_B1 = -high_B1
    for _ in range(HALVINGS):
        middle_B1 = (low_B1 + high_B1) / 2
        enough_B1 = np.clip(np.exp(middle_B1) * share_BG, low_G, high_G).sum(axis=1, keepdims=True) >= 1.0
        low_B1, high_B1 = np.where(enough_B1, low_B1, middle_B1), np.where(enough_B1, middle_B1, high_B1)
    return np.asarray(np.clip(np.exp(high_B1) * share_BG, low_G, high_G))


def most_informative(
    process: GaussianProcess, candidates: SubsetFeatures, count: int, decide: str, rng: np.random.Generator
) -> tuple[list[int], list[float]]:
    """Candidates to run, the most telling first, and what each settles. See the head of this module."""
    n_slices, n = candidates.share_BG.shape[1], len(candidates)
    points = candidates
    if decide == "values":
        even_G = process.runs.share_BG.mean(axis=0)
        without_GG = np.where(np.eye(n_slices, dtype=bool), 0.0, even_G)
        share_BG = np.concatenate([without_GG / without_GG.sum(axis=1, keepdims=True), even_G[None]])
        points = SubsetFeatures.concatenate(
            [candidates, SubsetFeatures.from_shares(share_BG, candidates.relevance_BT.shape[1])]
        )
    mean_B, cover_BB, noise = process.joint(points, -1)
    spread_B = np.sqrt(np.maximum(np.diag(cover_BB)[:n], 0.0))
    likely = np.argsort(-(mean_B[:n] + 2 * spread_B))[: TRIED // 2]
    tried = np.unique(np.concatenate([likely, rng.permutation(n)[: TRIED // 2]]))
    picked, settles = list[int](), list[float]()
    for _ in range(min(count, len(tried))):
        moved_Bx = cover_BB[:, tried] / np.sqrt(np.maximum(np.diag(cover_BB)[tried], 0.0) + noise)
        if decide == "best":  # E max(m + s z) - max m for every column of s
            nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
            best_x = sum(
                weight * (mean_B[:n, None] + node * moved_Bx[:n]).max(axis=0)
                for node, weight in zip(nodes, weights / weights.sum(), strict=True)
            )
            gain_x = np.asarray(np.maximum(best_x - mean_B[:n].max(), 0.0))
        else:
            effect_Gx = moved_Bx[n:-1] - moved_Bx[-1]
            # the sum of the variances of leaving a value out; the last point is the mean of the runs
            variance_G = np.diag(cover_BB)[n:-1] + cover_BB[-1, -1] - 2 * cover_BB[n:-1, -1]
            left = float(np.maximum(variance_G, 0.0).sum())
            gain_x = (effect_Gx**2).sum(axis=0) / max(left, np.finfo(float).tiny)
        gain_x[np.isin(tried, picked)] = -np.inf
        x = int(np.argmax(gain_x))
        picked.append(int(tried[x]))
        settles.append(float(gain_x[x]))
        cover_BB = cover_BB - np.outer(moved_Bx[:, x], moved_Bx[:, x])
    return picked, settles


def runs_by_shares(environment: RetrainedRuns, artifact: ArtifactReader) -> RunTable:
    """Retrained subsets as runs by shares of the label that they were drawn by; losses are the targets'."""
    if environment.label is None:
        raise RunsError(f"{environment.path}: its subsets were not drawn by a label, so have no shares")
    column = label_column(artifact, environment.label)
    slices = label_slices(column, row_tokens(artifact), most=len(column.values))
    blocks = list(environment.subset_blocks(RowIndex.from_parquet(artifact.rows_path), column))
    n_rows = len(slices.codes_N)
    slice_NG = csr_array((np.ones(n_rows), slices.codes_N, np.arange(n_rows + 1)), shape=(n_rows, len(slices.slices)))
    share_RG = np.concatenate(
        [(block.weights_BN @ slice_NG).toarray() / block.weights.sums[:, None] for block in blocks]
    )
    runs = environment.subset_ids
    utility_RST = environment.task_utilities(environment.targets)
    lines = [
        (run, seed, None, None, f"{target}/loss", None, -float(utility_RST[r, s, t]))
        for r, run in enumerate(runs)
        for s, seed in enumerate(environment.info.seeds)
        for t, target in enumerate(environment.targets)
    ]
    columns = zip(*lines, strict=True)
    results = pa.table(
        [pa.array(values, field.type) for values, field in zip(columns, RESULTS_SCHEMA, strict=True)],
        schema=RESULTS_SCHEMA,
    )
    metrics = {f"{target}/loss": "lower" for target in environment.targets}
    info = RunsInfo.model_validate({"kind": "shares", "label": environment.label, "metrics": metrics})
    return RunTable.from_results(environment.name, info, _trained(runs, slices.names, share_RG), results)


def _trained(runs: Sequence[str], values: Sequence[str], share_RG: F64) -> pa.Table:
    """Return what runs were trained on, one row per run and value."""
    r, g = (index.ravel() for index in np.indices(share_RG.shape))
    columns = [np.array(runs, object)[r], np.array(values, object)[g], share_RG.ravel()]
    return pa.table([pa.array(column) for column in columns], TRAINED_SCHEMA.names).cast(TRAINED_SCHEMA)
