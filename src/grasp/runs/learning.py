"""Runs beside an artifact: what is known of each subset before any run, and what the runs add. Start with `learn`.

Shape letters: R runs, S seeds, B subsets, N rows, G slices, T targets.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from grasp.artifact.reader import ArtifactReader
from grasp.errors import EnvironmentDataError, ProtocolLeakError, SubsetError
from grasp.predict.blocks import WeightedRows, in_blocks
from grasp.predict.intervals import COVERAGE, FitIntervals, NatsTable
from grasp.predict.label_slices import label_slices, sensible_labels
from grasp.predict.predictor import Predictor
from grasp.predict.relevance import Kernel
from grasp.predict.row_arrays import row_tokens
from grasp.predict.row_sums import RowSums
from grasp.predict.slices import LabelTable
from grasp.predict.subset_tables import RowIndex
from grasp.predict.weights import SliceShares, Weights, weight_sums
from grasp.runs.covariance import Features
from grasp.runs.environment import Environment
from grasp.runs.learned import Learned
from grasp.runs.scored import Scored
from grasp.runs.table import NAMED, RunTable, any_runs

F64 = NDArray[np.float64]
FAR = 1 + 1e-6


@dataclass(frozen=True, slots=True)
class Known:
    """What an artifact knows of any subset: means over its rows."""

    predictor: Predictor
    indicators: tuple[RowSums, ...]  # of the slices, a label each
    kernels: tuple[RowSums, ...]

    @classmethod
    def of(cls, predictor: Predictor, artifact: ArtifactReader, labels: Sequence[str]) -> Self:
        """Args: labels: whose slices' shares are features."""
        table, tokens_N = LabelTable(artifact.rows_path), row_tokens(artifact)
        slices = [label_slices(table.column(name), tokens_N) for name in labels]
        held = tuple(_indicators(one.codes_N, len(one.slices)) for one in slices)
        names = [name.removeprefix("relevance_") for name in artifact.array_names if name.startswith("relevance_")]
        negative = predictor.protocol.negative
        kernels = [Kernel.of_tasks(artifact, name, predictor.units, negative, 1.0) for name in names]
        return cls(predictor, held, tuple(kernel.held for kernel in kernels))

    def features(self, weights: Weights) -> Features:
        """Of one block of subsets."""
        sums = self.predictor.sums(weights)
        mass_B1 = weight_sums(weights)[0][:, None]
        nothing_B0 = np.empty((len(mass_B1), 0))
        sketch = [part.total_BD / mass_B1 for half, part in sums.sketch.items() if half != "product"]
        return Features(
            np.concatenate([nothing_B0, *(one.sums(weights) / mass_B1 for one in self.indicators)], axis=1),
            self.predictor.change_of(sums),
            np.stack([one.sums(weights) / mass_B1 for one in self.kernels], axis=2),
            np.concatenate([nothing_B0, *sketch], axis=1),
        )

    def corpus(self) -> Features:
        """Of the corpus itself."""
        return self.features(SliceShares(np.ones((1, 1)), np.zeros(self.predictor.n_rows, dtype=np.int32)))


@dataclass(frozen=True, slots=True)
class Expected:
    """What runs say of the predictions of one predictor: the change in their own unit, with an interval."""

    title: str  # what the numbers are, in words
    notes: tuple[str, ...]
    known: Known
    learned: Learned
    columns: Mapping[str, int]  # target -> its task among those learned
    coverage: float = COVERAGE

    def of(self, weights: Weights) -> NatsTable:
        """Change of subsets against the corpus; nan where a target has no runs."""
        features = _pick(self.known.features(weights), self._chosen)
        corpus = _pick(self.known.corpus(), self._chosen)
        mean_Bt, spread_Bt = self.learned.change(features, corpus)
        half_Bt = self.learned.quantile(self.coverage) * spread_Bt
        shape = (len(mean_Bt), len(self.known.predictor.targets))
        expected, half = np.full(shape, np.nan), np.full(shape, np.nan)
        for t, target in enumerate(self.known.predictor.targets):
            if target in self.columns:
                expected[:, t], half[:, t] = mean_Bt[:, self.columns[target]], half_Bt[:, self.columns[target]]
        far_B = self.learned.reach(features, corpus)
        outside = [f"{far:.1f} times as far from the corpus as any run" if far > FAR else "" for far in far_B]
        return NatsTable(expected, expected - half, expected + half, tuple(outside))

    def formula(self) -> dict[str, Any]:
        """What a page needs to compute the same by itself: see `Learned.formula`; `tasks` are those of the targets."""
        targets = self.known.predictor.targets
        said = {"tasks": [self.columns.get(name) for name in targets], "quantile": self.learned.quantile(self.coverage)}
        return said | self.learned.formula(_pick(self.known.corpus(), self._chosen))

    def terms(self, weights: Weights) -> dict[str, Any]:
        """What the formula takes of subsets: see `Learned.terms`."""
        return self.learned.terms(_pick(self.known.features(weights), self._chosen))

    @property
    def _chosen(self) -> list[int]:
        targets = self.known.predictor.targets
        return [targets.index(name) for name in sorted(self.columns, key=self.columns.__getitem__)]


@dataclass(frozen=True, slots=True)
class _Given:
    """Runs with their weights over the artifact's rows."""

    blocks: Sequence[Weights]
    utility_RST: F64  # nan: a run without that seed
    targets: tuple[str, ...]  # of the predictor, in the order of the last axis
    title: str
    notes: tuple[str, ...]
    label: str | None


def learning_from(artifact: ArtifactReader, runs: Environment | RunTable | Path | str | None) -> FitIntervals | None:
    """What learns from runs, or from the directory that holds them; None without them."""
    return None if runs is None else partial(learn, artifact=artifact, runs=any_runs(runs))


def learn(
    predictor: Predictor, artifact: ArtifactReader, runs: Environment | RunTable, *, coverage: float = COVERAGE
) -> Expected:
    """Learn from runs what a predictor's changes are in the runs' own unit.

    Raises:
        ProtocolLeakError: the environment is held out, or all of the targets are.
        EnvironmentDataError: runs and artifact have no target or no label in common, or there are too few runs.
    """
    given = (
        _environment(predictor, artifact, runs) if isinstance(runs, Environment) else _table(predictor, artifact, runs)
    )
    labels = dict.fromkeys([*([given.label] if given.label else []), *sensible_labels(artifact)])
    known = Known.of(predictor, artifact, tuple(labels))
    parts = [known.features(weights) for weights in given.blocks]
    chosen = [predictor.targets.index(name) for name in given.targets]
    features = _pick(Features.joined(parts), chosen)
    learned = learn_features(features, given.utility_RST)
    missing = [name for name in predictor.targets if name not in given.targets]
    rise_T = _rise(features.relevance_BT, np.nanmean(given.utility_RST, axis=1))
    against = [
        f"{name}: what came out does not rise with the prediction; the runs correct it"
        for name, rises in zip(given.targets, rise_T >= 0, strict=True)
        if not rises
    ]
    notes = [*given.notes, *against, *([f"no runs for {', '.join(missing)}: no expected change"] if missing else [])]
    title = f"nats, nats_low, nats_high: change in {given.title}".replace("INTERVAL", f"{coverage:.0%} interval")
    return Expected(title, tuple(notes), known, learned, {name: t for t, name in enumerate(given.targets)}, coverage)


def _rise(relevance_RT: F64, utility_RT: F64) -> F64:
    """(T,) covariance over the runs."""
    return np.asarray(((relevance_RT - relevance_RT.mean(axis=0)) * utility_RT).sum(axis=0))


def learn_features(features: Features, utility_RST: F64) -> Learned:
    """Learn from runs by their features; seeds are averaged, and their spread is told to the predictor.

    What a seed adds to all runs alike is taken off, where every run has every seed.
    """
    if not np.isnan(utility_RST).any():
        utility_RST = utility_RST - utility_RST.mean(axis=0) + utility_RST.mean(axis=(0, 1))
    count_R = (~np.isnan(utility_RST[:, :, 0])).sum(axis=1)
    mean_RT = np.nanmean(utility_RST, axis=1)
    within_T = np.nansum((utility_RST - mean_RT[:, None]) ** 2, axis=(0, 1))
    return Learned.fit(features, mean_RT, seeds_n=count_R.astype(np.float64), within_T=within_T)


# ------------------------------------------------------------------------------------------------- where runs are from


def _environment(predictor: Predictor, artifact: ArtifactReader, environment: Environment) -> _Given:
    """Retrained subsets, and the runs on the whole corpus."""
    scored, targets = development_targets(predictor, artifact, environment)
    utilities = environment.utilities()
    subset_ids = [name for block in scored.blocks for name in block.subset_ids]
    order = [utilities.subset_ids.index(name) for name in subset_ids]
    values_RST = np.stack([utilities.of(name).values_BSE.mean(axis=2) for name in targets.values()], axis=2)[order]
    blocks = [block.weights for block in scored.blocks]
    reference_SE = environment.reference_utilities()
    if len(reference_SE) == values_RST.shape[1]:
        of_target = [[e for e, (name, _) in enumerate(environment.units) if name == t] for t in targets.values()]
        whole_ST = np.stack([reference_SE[:, columns].mean(axis=1) for columns in of_target], axis=1)
        values_RST = np.concatenate([values_RST, whole_ST[None]])
        blocks.append(SliceShares(np.ones((1, 1)), np.zeros(predictor.n_rows, dtype=np.int32)))
    seeds = f"{len(utilities.seeds)} seed" + ("s" if len(utilities.seeds) > 1 else "")
    title = (
        f"nats a token, INTERVAL, for a model retrained as in {environment.name} (recipe "
        f"{environment.info.recipe}, mean of {seeds})"
    )
    notes = []
    if predictor.protocol.chosen_on(scored.runs_fingerprint):
        notes.append(f"the protocol was selected on {environment.name}: its intervals are somewhat too narrow")
    label = None if environment.info.family is None else scored.calibration.parsed.label
    return _Given(blocks, values_RST, tuple(targets), title, tuple(notes), label)


def development_targets(
    predictor: Predictor, artifact: ArtifactReader, environment: Environment
) -> tuple[Scored, dict[str, str]]:
    """An artifact beside an environment, and the environment's names of the predictor's targets; none held out.

    Raises:
        ProtocolLeakError: the environment is held out, or all of the targets are.
        EnvironmentDataError: artifact and environment do not belong together, or share no target.
    """
    if environment.role != "dev":
        raise ProtocolLeakError(
            f"{environment.path}: is held out; intervals are fitted on development environments only, or nothing is "
            "left to test them on"
        )
    scored = Scored.of(environment, artifact)
    common = {own: theirs for own, theirs in scored.renamed.items() if own in predictor.targets}
    if not common:
        raise EnvironmentDataError(
            f"{environment.path}: has targets {list(environment.targets)}, asked are {list(predictor.targets)}; none "
            "is common to both"
        )
    targets = {own: theirs for own, theirs in common.items() if environment.role_of(theirs) == "dev"}
    if not targets:
        raise ProtocolLeakError(
            f"{environment.path}: intervals were asked for {list(common.values())}, which are held out; they are "
            "fitted on development targets only"
        )
    return scored, targets


def _table(predictor: Predictor, artifact: ArtifactReader, runs: RunTable) -> _Given:
    """Imported runs; they belong to documents, so labels, row ids and document ids are all that is compared."""
    metric_of = {}
    for target in predictor.targets:
        fitting = [name for name in runs.metrics if name == target or name.startswith(f"{target}/")]
        if fitting:
            metric_of[target] = next((name for name in fitting if "loss" in name), fitting[0])
    if not metric_of:
        raise EnvironmentDataError(
            f"{runs.name}: has the metrics {', '.join(runs.metrics[:NAMED])}, asked are "
            f"{', '.join(predictor.targets)}; a metric belongs to the target it is called by, e.g. sciq or sciq/acc"
        )
    utility_RST = runs.utility_RST()[:, :, [runs.metrics.index(name) for name in metric_of.values()]]
    same = [f"{target}: {name}" for target, name in metric_of.items() if name != target]
    unit = f"the runs' own unit ({', '.join(metric_of.values())}; higher is better)"
    title = f"{unit}, INTERVAL, by the {len(runs)} runs of {runs.name}"
    notes = [f"metrics of the runs: {'; '.join(same)}"] if same else []
    weights, said = row_weights(runs, artifact)
    return _Given(weights, utility_RST, tuple(metric_of), title, (*notes, *said), runs.info.label)


def row_weights(runs: RunTable, artifact: ArtifactReader) -> tuple[list[Weights], tuple[str, ...]]:
    """Weights of the artifact's rows in every run, in order; and what should be known of them.

    Raises:
        EnvironmentDataError: a value, row or document that the artifact lacks.
    """
    table = LabelTable(artifact.rows_path)
    if runs.info.kind == "rows":
        return _by_rows(runs, table, RowIndex.from_parquet(artifact.rows_path)), ()
    weight_RG = runs.weights_RG()
    if runs.info.kind == "expressions":
        masks_GN = [table.matching(expression).mask_N for expression in runs.values]
        rows = (_weighted(run, weight_RG[r], masks_GN) for r, run in enumerate(runs.runs))
        return [block.weights for block in in_blocks(rows, artifact.n_rows, 256)], ()
    assert runs.info.label is not None
    try:
        column = table.column(runs.info.label)
    except SubsetError as err:
        raise EnvironmentDataError(f"{runs.name}: {err}") from err
    code_of = {name: code for code, name in enumerate(column.names())}
    place = _matched(runs, code_of)
    factor_RG = np.zeros((len(runs), len(column.values)))
    factor_RG[:, place] = weight_RG
    if runs.info.kind == "shares":
        factor_RG *= artifact.n_rows / np.maximum(column.counts, 1)
    unseen = [name for name, code in code_of.items() if code not in place]
    said = (f"{len(unseen)} values of {column.name} are in no run: {', '.join(unseen[:NAMED])}",) if unseen else ()
    return [SliceShares(factor_RG, column.codes_N)], said


def _matched(runs: RunTable, code_of: Mapping[str, int]) -> list[int]:
    """Codes of the table's values; what all its names begin with may be left off, as in train_arxiv, train_github."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(min(runs.values), max(runs.values), strict=False))
    common = "".join(letter for letter, _ in pairs)
    for names in (list(runs.values), [name.removeprefix(common) for name in runs.values]):
        if all(name in code_of for name in names):
            return [code_of[name] for name in names]
    lacking = [name for name in runs.values if name not in code_of]
    raise EnvironmentDataError(
        f"{runs.name}: {len(lacking)} values of {runs.info.label} are not in the artifact: "
        f"{', '.join(lacking[:NAMED])}; it has {', '.join(list(code_of)[:NAMED])}"
    )


def _by_rows(runs: RunTable, table: LabelTable, index: RowIndex) -> list[Weights]:
    """By row id, else by document."""
    names = [str(one) for one in index.ids().to_pylist()]
    place: dict[str, list[int]] = {name: [n] for n, name in enumerate(names)}
    if any(name not in place for name in runs.values) and "doc_id" in table.columns:
        column = table.column("doc_id")
        order = np.argsort(column.codes_N, kind="stable")
        rows_of = np.split(order, np.cumsum(column.counts)[:-1])
        documents = {str(name): rows.tolist() for name, rows in zip(column.values, rows_of, strict=True)}
        place = documents if all(name in documents for name in runs.values) else place
    lacking = [name for name in runs.values if name not in place]
    if lacking:
        raise EnvironmentDataError(
            f"{runs.name}: {len(lacking)} rows or documents are not in the artifact: {', '.join(lacking[:NAMED])}"
        )
    per_run: dict[str, tuple[list[int], list[float]]] = {run: ([], []) for run in runs.runs}
    lines = (runs.trained[column].to_pylist() for column in ("run", "name", "weight"))
    for run, name, weight in zip(*lines, strict=True):
        per_run[run][0].extend(place[name])
        per_run[run][1].extend([weight] * len(place[name]))
    subsets: Iterable[WeightedRows] = (
        WeightedRows(run, np.array(rows)[order], np.array(weights)[order])
        for run, (rows, weights) in per_run.items()
        for order in [np.argsort(rows)]
    )
    return [block.weights for block in in_blocks(subsets, index.n_rows, 256)]


def _weighted(run: str, weight_G: F64, masks_GN: Sequence[NDArray[np.bool_]]) -> WeightedRows:
    """Expressions add up: a row that two of them match has both weights."""
    weight_N = np.sum([weight * mask_N for weight, mask_N in zip(weight_G, masks_GN, strict=True)], axis=0)
    kept = np.flatnonzero(weight_N)
    return WeightedRows(run, kept, weight_N[kept])


# --------------------------------------------------------------------------------------------------------- inside


def _indicators(codes_N: NDArray[np.int32], n_slices: int) -> RowSums:
    one_GG = np.eye(n_slices, dtype=np.float32)
    step = 1 << 16
    return RowSums(
        lambda: ((at, one_GG[codes_N[at : at + step]]) for at in range(0, len(codes_N), step)), len(codes_N), n_slices
    )


def _pick(features: Features, tasks: Sequence[int]) -> Features:
    """The same of some of the tasks."""
    return Features(
        features.share_BG, features.relevance_BT[:, tasks], features.kernel_BTM[:, tasks], features.sketch_BD
    )
