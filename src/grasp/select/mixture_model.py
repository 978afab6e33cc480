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
from grasp.select.quadratic_program import Programme, climb
from grasp.text import listed

Runs = RunTable | Path | str

CANDIDATES = 1_000
TRIED = 250  # of the candidates: those that may be best, and some of the others
MOST = TRIED // 2  # so many different ones are among them for certain
NODES = 21  # of the quadrature
SLACK = 0.005  # of a share, beyond those of the runs
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
        value = (self.sign_T * mean_BT)[b, t]
        return pa.table(
            {
                "mixture": pa.array(np.array(names, object)[b], pa.string()),
                "metric": pa.array(np.array(self.table.metrics, object)[t], pa.string()),
                "expected": value,
                "low": value - half_BT[b, t],
                "high": value + half_BT[b, t],
            }
        )


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

    The interval of a metric holds nine of ten runs.

    Args:
        runs: imported runs, see `grasp runs import`.
        mixtures: a line a mixture, a column a value of the label: shares that add up to 1.
        metric: metrics, separated by commas. Default: all of them.
    Raises:
        RunsError: see `Taught.from_runs`; values that no run has; shares that do not add up to 1.
    """
    taught = Taught.from_runs(runs, metric)
    names, share_BG = read_mixtures(mixtures, taught.table.values)
    # mixtures that give a value more, or less, than any run did
    low_G, high_G = taught.share_RG.min(axis=0), taught.share_RG.max(axis=0)
    beyond_BG = np.maximum(share_BG - high_G, low_G - share_BG)
    outside = []
    for b, g in enumerate(beyond_BG.argmax(axis=1).tolist()):
        if beyond_BG[b, g] > SLACK:
            covered = f"in the runs {low_G[g]:.0%} to {high_G[g]:.0%}"
            outside.append(f"{names[b]} ({taught.table.values[g]} {share_BG[b, g]:.0%}, {covered})")
    notes = taught.notes
    if outside:
        more = f" and {len(outside) - NAMED:,} more" if len(outside) > NAMED else ""
        told = "; ".join(outside[:NAMED])
        notes = (f"outside of what the runs covered, so trust it less: {told}{more}", *notes)
    headline = f"{len(names):,} mixtures, by {len(taught.table):,} runs"
    return Result(taught.lines(names, share_BG), headline, notes, signs=False)


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
        subsets: the mixtures as weights of rows, for `grasp retrain` --set subsets=FILE.
        seed: seed of the mixtures that are looked at.
        artifact: of the corpus; for retrained runs, whose shares are those of the label that they were drawn by, and
            for `subsets`.
    Returns:
        A line a mixture, in the order in which they should be trained: mixture, settles, and the shares of all values.
        For `best`, settles is by how much the best mixture is expected to become better, in the unit of the metric; for
        `values` it is the part of the uncertainty of all values that the run takes away.
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
    share_BG = np.stack([draw_dirichlet_shares(rng, np.maximum(even_G, 1e-3)) for _ in range(CANDIDATES)])
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
    return Proposal(
        pa.table({"mixture": names, "settles": settles} | columns),
        f"{len(picked)} mixtures that say most of {what}, by {len(found):,} runs; train the first one first",
        (f"settles: {settled}", *taught.notes),
        signs=False,
    )


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
