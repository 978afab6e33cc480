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
from grasp.runs.gaussian_process import Learned, SubsetFeatures
from grasp.runs.import_runs import read_mixtures
from grasp.runs.retrained import RetrainedRuns
from grasp.runs.table import NAMED, RESULTS_SCHEMA, TRAINED_SCHEMA, RunsInfo, RunTable, open_runs
from grasp.seeds import stream
from grasp.select.budget import by_value, parse_bounds, parse_tokens, spelled
from grasp.select.mix import MAX_REPEAT
from grasp.select.quadratic_program import Programme, climb
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
class Taught:
    """Runs by shares, and what was learned of every metric and, last, of their weighted mean, the aim."""

    table: RunTable
    share_RG: F64
    learned: Learned
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
        named = metric or table.metrics
        asked = dict(named) if isinstance(named, Mapping) else dict.fromkeys(listed(named, table.metrics), 1.0)
        unknown = [name for name in asked if name not in table.metrics]
        if unknown or not sum(asked.values()) > 0 or min(asked.values()) < 0:
            raise RunsError(
                f"{table.name}: got the metrics {asked}, expected some of {', '.join(table.metrics[:NAMED])} ... with "
                "weights of 0 or more"
            )
        weights_T = np.array([asked.get(name, 0.0) for name in table.metrics]) / sum(asked.values())
        utility_RST = table.utility_RST()
        aim_RS1 = (utility_RST @ weights_T)[:, :, None]
        share_RG = table.weights_RG()
        features = SubsetFeatures.from_shares(share_RG, len(weights_T) + 1)
        learned = Learned.fit(features, np.concatenate([utility_RST, aim_RS1], axis=2))
        sign_T = np.array([1.0 if table.info.metrics[name] == "higher" else -1.0 for name in table.metrics])
        return cls(table, share_RG, learned, weights_T, sign_T)

    @property
    def notes(self) -> tuple[str, ...]:
        size = f" of size {self.table.sizes[0]}" if self.table.sizes else ""
        return (f"{COVERAGE:.0%} intervals, for the mean of many seeds{size}",)

    def features(self, share_BG: F64) -> SubsetFeatures:
        return SubsetFeatures.from_shares(share_BG, len(self.weights_T) + 1)

    def aim(self, share_BG: F64, cautious: float = 0.0) -> F64:
        """Expected weighted mean less so many standard deviations, (B,); higher is better."""
        mean_BT, spread_BT = self.learned.predict(self.features(share_BG))
        return np.asarray(mean_BT[:, -1] - cautious * spread_BT[:, -1])

    def lines(self, names: Sequence[str], share_BG: F64) -> pa.Table:
        """mixture, metric, expected, low, high: in the metric's own unit."""
        mean_BT, spread_BT = (one[:, :-1] for one in self.learned.predict(self.features(share_BG)))
        half_BT = self.learned.quantile(COVERAGE) * spread_BT
        asked = np.flatnonzero(self.weights_T)
        b, t = (index.reshape(-1) for index in np.meshgrid(np.arange(len(names)), asked, indexing="ij"))
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
        return outside_B1 & (self.learned.ignorance(self.features(share_BG), COVERAGE) > 1.0)

    def settling_run(self, share_G: F64) -> F64:
        """(G,) the run nearest to the mean of the runs after which a mixture is not refused.

        Looked for on the straight line from the mean to the mixture; the mixture itself, if no other is enough.
        """
        mixture = self.features(share_G[None])
        task = int(np.argmax(self.learned.ignorance(mixture, COVERAGE)[0] * np.append(self.weights_T > 0, True)))
        mean_G = self.share_RG.mean(axis=0)
        line_BG = mean_G + np.linspace(0.0, 1.0, STEPS + 1)[1:, None] * (share_G - mean_G)
        after_B = self.learned.ignorance_after(mixture, self.features(line_BG), task, COVERAGE)
        enough_B = after_B <= 1.0
        return np.asarray(line_BG[int(np.argmax(enough_B)) if enough_B.any() else -1])


@dataclass(frozen=True, eq=False, repr=False)
class Proposal(Result):
    """Mixtures to train; on a screen a line a value, as there may be many."""

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
        mixtures: a line a mixture, a column a value of the label: shares that add up to 1.
        metric: metrics, separated by commas. Default: all of them.
    Raises:
        RunsError: see `Taught.from_runs`; values that no run has; shares that do not add up to 1.
    """
    taught = Taught.from_runs(runs, metric)
    names, share_BG = read_mixtures(mixtures, taught.table.values)
    asked_T = np.append(taught.weights_T > 0, False)
    refused_B = (taught.refused(share_BG) & asked_T).any(axis=1)
    notes = [
        *_outside(taught, names, share_BG, ~refused_B, "outside of what the runs covered, so the interval is wider"),
        *_outside(taught, names, share_BG, refused_B, "no number, too far outside of what the runs covered"),
    ]
    for b in np.flatnonzero(refused_B)[:NAMED].tolist():
        run_G = taught.settling_run(share_BG[b])
        shares = ", ".join(f"{taught.table.values[g]} {run_G[g]:.0%}" for g in np.argsort(-run_G)[:SHARES_SHOWN])
        more = f" and {len(run_G) - SHARES_SHOWN} more" if len(run_G) > SHARES_SHOWN else ""
        notes.append(f"a run that would settle {names[b]}: {shares}{more}")
    headline = f"{len(names):,} mixtures, by {len(taught.table):,} runs"
    return Result(taught.lines(names, share_BG), headline, (*notes, *taught.notes), signs=False)


def _outside(taught: Taught, names: Sequence[str], share_BG: F64, among_B: NDArray[np.bool_], what: str) -> list[str]:
    """One sentence on the mixtures that give a value more, or less, than any run did; none if there are none."""
    low_G, high_G = taught.share_RG.min(axis=0), taught.share_RG.max(axis=0)
    beyond_BG = taught.beyond(share_BG)
    outside = []
    for b in np.flatnonzero(among_B & (beyond_BG > SLACK).any(axis=1)).tolist():
        g = int(np.argmax(beyond_BG[b]))
        covered = f"in the runs {low_G[g]:.0%} to {high_G[g]:.0%}"
        outside.append(f"{names[b]} ({taught.table.values[g]} {share_BG[b, g]:.0%}, {covered})")
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
    taught = Taught.from_runs(runs, metric)
    low_G, high_G = taught.share_RG.min(axis=0), taught.share_RG.max(axis=0)
    programme = Programme(np.zeros(len(low_G)), low_G, high_G, taught.share_RG.mean(axis=0))
    starts = taught.share_RG[np.argsort(-taught.aim(taught.share_RG, cautious), kind="stable")[:CLIMBS]]
    best_G = climb(programme, lambda share_BG: taught.aim(share_BG, cautious), list(starts))
    known_R = taught.learned.predict(taught.features(taught.share_RG))[0][:, -1]
    run_G = taught.share_RG[int(np.argmax(known_R))]
    shares = pa.table(
        {
            "value": pa.array(taught.table.values, pa.string()),
            "mean_of_runs": taught.share_RG.mean(axis=0),
            "best_run": run_G,
            "proposed": best_G,
        }
    ).sort_by([("proposed", "descending")])
    said = [
        f"{line['metric']}: {line['mixture']} {line['expected']:.4g} ({line['low']:.4g} to {line['high']:.4g})"
        for line in taught.lines(["proposed", "best run"], np.stack([best_G, run_G])).to_pylist()
    ]
    headline = f"the best mixture by {len(taught.table):,} runs of {taught.table.name}"
    return Result(shares, headline, (*said, *taught.notes), signs=False)


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
        A line a mixture, in the order in which they should be trained: mixture, settles, and the shares of all values.
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
    found = open_runs(runs)
    if isinstance(found, RetrainedRuns):
        if artifact is None:
            raise SettingsError(f"propose: {found.path} holds retrained subsets; name the artifact of their corpus")
        found = shares_of(found, artifact.files)
    taught = Taught.from_runs(found, metric)
    rng = stream(seed, "propose", len(taught.table))
    even_G = taught.share_RG.mean(axis=0)
    label, values = taught.table.info.label, taught.table.values
    largest_G = np.ones(len(values))
    notes = ["no limit on repetition: sizes of the values are unknown without an artifact (--art); see --cap"]
    if artifact is not None:
        rows = isinstance(open_runs(runs), RetrainedRuns)
        largest_G, notes = repetition_caps(artifact.files, label, values, max_repeat, train_tokens, rows=rows)
    low_G, high_G = share_bounds(label, values, floor, cap, largest_G)
    share_BG = within_bounds(
        np.stack([draw_dirichlet_shares(rng, np.maximum(even_G, 1e-3)) for _ in range(CANDIDATES)]), low_G, high_G
    )
    picked, settles = most_telling(taught.learned, taught.features(share_BG), count, decide, rng)
    names = [f"next-{k + 1}" for k in range(len(picked))]
    table = taught.table
    if subsets is not None:
        if artifact is None:
            raise SettingsError("propose: subsets are of the rows of an artifact; name it")
        files, trained = artifact.files, _trained(names, table.values, share_BG[picked])
        blocks, _ = row_weights(replace(table, trained=trained), files)
        corpus = files.manifest.fingerprints.get("corpus", "")
        write_subsets(Path(subsets), blocks, RowIndex.from_parquet(files.rows_path), weights=True, corpus=corpus)
    if decide == "best":
        what = "the best mixture"
        settled = "by how much the best mixture is expected to become better through this run, in the metric's unit"
    else:
        what = f"what each {table.info.label} is worth"
        settled = "the part of what is uncertain of all values that this run takes away, in the metric's unit"
    columns = {name: share_BG[picked, g] for g, name in enumerate(table.values)}
    expected_B = taught.aim(share_BG)
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
        f"{len(picked)} mixtures that say most of {what}, by {len(found):,} runs; train the first one first",
        (f"settles: {settled}", *notes, *taught.notes),
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
    size_of = {one.name: one.rows if rows else one.tokens for one in slices.slices}
    total = sum(one.tokens for one in slices.slices)
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
                raise SettingsError(f"{flag} {spelled(value)}: a mixture has shares; expected e.g. web:5%")
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


def within_bounds(share_BG: F64, low_G: F64, high_G: F64) -> F64:
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


def most_telling(
    learned: Learned, candidates: SubsetFeatures, count: int, decide: str, rng: np.random.Generator
) -> tuple[list[int], list[float]]:
    """Candidates to run, the most telling first, and what each settles. See the head of this module."""
    n_slices, n = candidates.share_BG.shape[1], len(candidates)
    points = candidates
    if decide == "values":
        even_G = learned.runs.share_BG.mean(axis=0)
        without_GG = np.where(np.eye(n_slices, dtype=bool), 0.0, even_G)
        share_BG = np.concatenate([without_GG / without_GG.sum(axis=1, keepdims=True), even_G[None]])
        points = SubsetFeatures.joined(
            [candidates, SubsetFeatures.from_shares(share_BG, candidates.relevance_BT.shape[1])]
        )
    mean_B, cover_BB, noise = learned.joint(points, -1)
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
            own_G = np.diag(cover_BB)[n:-1] + cover_BB[-1, -1] - 2 * cover_BB[n:-1, -1]
            left = float(np.maximum(own_G, 0.0).sum())
            gain_x = (effect_Gx**2).sum(axis=0) / max(left, np.finfo(float).tiny)
        gain_x[np.isin(tried, picked)] = -np.inf
        x = int(np.argmax(gain_x))
        picked.append(int(tried[x]))
        settles.append(float(gain_x[x]))
        cover_BB = cover_BB - np.outer(moved_Bx[:, x], moved_Bx[:, x])
    return picked, settles


def shares_of(environment: RetrainedRuns, artifact: ArtifactReader) -> RunTable:
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
        [pa.array(one, field.type) for one, field in zip(columns, RESULTS_SCHEMA, strict=True)], schema=RESULTS_SCHEMA
    )
    metrics = {f"{target}/loss": "lower" for target in environment.targets}
    info = RunsInfo.model_validate({"kind": "shares", "label": environment.label, "metrics": metrics})
    return RunTable.from_results(environment.name, info, _trained(runs, slices.names, share_RG), results)


def _trained(runs: Sequence[str], values: Sequence[str], share_RG: F64) -> pa.Table:
    """What runs were trained on, a line a run and value."""
    r, g = (index.ravel() for index in np.indices(share_RG.shape))
    columns = [np.array(runs, object)[r], np.array(values, object)[g], share_RG.ravel()]
    return pa.table([pa.array(one) for one in columns], TRAINED_SCHEMA.names).cast(TRAINED_SCHEMA)
