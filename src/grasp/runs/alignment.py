"""Match runs with an artifact: their subsets in its rows, and its predictions for them.

Start with `bind_runs` and `Alignment.from_runs`. Retrained runs use the rows of the artifact. Imported runs refer to
label values, documents or expressions: `ImportedRuns` converts their weights to row weights, and their metrics to
utilities of the targets with the same name, so that all code that uses `TrainingRuns` accepts both.
Shape letters: R runs, S seeds, T targets, B subsets, E units, G values of a label.
"""

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np

from grasp.arrays import F64
from grasp.artifact.label_table import LabelColumn, LabelTable
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import label_column
from grasp.errors import RunsError, SubsetError
from grasp.predict.predictor import Predictor
from grasp.predict.scoring_rule import ScoringProtocol
from grasp.predict.subset_tables import RowIndex
from grasp.predict.weights import SubsetBlock, WeightedRows, Weights, in_blocks
from grasp.runs.predictions import WHOLE_TASK, Cost, Predictions
from grasp.runs.table import MAX_LISTED, RunTable, open_runs
from grasp.runs.training_runs import ALL_SUFFIX, RetrainedRunsInfo, Run, TargetInfo, TrainingRuns
from grasp.targets.units import LossOn, UnitSet, stored_units

BLOCK_SUBSETS = 256
NATS = r"(^|_)(loss|nll|ce)($|_)|loss$"  # names of metrics in nats per token


def unit_fingerprints(artifact: ArtifactReader, loss_on: LossOn) -> dict[str, str]:
    """Return the fingerprint of the units of every target of an artifact."""
    units = stored_units(artifact.units, loss_on)
    return {
        target: UnitSet(tuple(unit for unit in units if unit.target == target)).fingerprint
        for target in artifact.targets
    }


def match_targets(runs: TrainingRuns, artifact: ArtifactReader) -> dict[str, str]:
    """Return the common targets of runs and artifact, as a mapping from the name in the runs to that in the artifact.

    Runs evaluate `sciq` with loss on the completion and `sciq@all` with loss on every token; an artifact has one of the
    two, with the name `sciq`.

    Raises:
        RunsError: corpora differ, units of a target differ, or there is no common target.
    """
    where = str(artifact.path)
    try:
        runs.check_corpus(artifact.manifest.fingerprints.get("corpus", "none"), where)
    except RunsError as err:
        command = runs.info.build_command(runs.path)
        raise RunsError(f"{err}" + (f": {command}" if command else "")) from err
    loss_on = artifact.manifest.settings.get("targets", {}).get("loss_on", "completion")
    fingerprints = unit_fingerprints(artifact, loss_on)
    common: dict[str, str] = {}
    for name, info in runs.info.targets.items():
        artifact_target = name.removesuffix(ALL_SUFFIX)
        if artifact_target not in artifact.targets or info.loss_on != loss_on:
            continue
        if fingerprints[artifact_target] != info.fingerprint:
            raise RunsError(
                f"{where}: units of {name} have fingerprint {fingerprints[artifact_target]}, but {runs.path} scored "
                f"{info.fingerprint}; build with the same target settings (variant, loss_on, units_per_target, seed)"
            )
        common[name] = artifact_target
    if not common:
        raise RunsError(
            f"{where}: has targets {list(artifact.targets)} with loss_on {loss_on!r}; {runs.path} has "
            f"{[(name, info.loss_on) for name, info in runs.info.targets.items()]}; none is common to both"
        )
    return common


@dataclass(frozen=True)
class Alignment:
    """Runs and an artifact of the same corpus and targets, with the subsets of the runs.

    Attributes:
        runs: retrained or imported runs.
        source: the artifact.
        run_targets: name of each common target in the runs, by its name in the artifact.
        blocks: subsets of the runs as weights of the rows of the artifact.
    """

    runs: TrainingRuns
    source: ArtifactReader
    run_targets: Mapping[str, str]
    blocks: tuple[SubsetBlock, ...]

    @classmethod
    def from_runs(cls, runs: TrainingRuns, artifact: ArtifactReader) -> Self:
        """Match runs with an artifact.

        Raises:
            RunsError: corpora or targets differ, or the subsets are not those trained on.
        """
        common = match_targets(runs, artifact)
        label = runs.label
        labels = None if label is None else label_column(artifact, label)
        blocks = tuple(runs.subset_blocks(RowIndex.from_parquet(artifact.rows_path), labels))
        return cls(runs, artifact, {artifact_target: name for name, artifact_target in common.items()}, blocks)

    @property
    def runs_fingerprint(self) -> str:
        """Fingerprint of the runs; see `TrainingRuns.fingerprint`."""
        return self.runs.fingerprint(self.blocks[0])

    def artifact_targets_of(self, targets: Sequence[str]) -> tuple[str, ...]:
        """Return the names in the artifact of targets of the runs."""
        name_in_artifact = {name: artifact_target for artifact_target, name in self.run_targets.items()}
        return tuple(name_in_artifact[name] for name in targets)

    def units(self, targets: Sequence[str]) -> tuple[tuple[str, str], ...]:
        """Return (target, unit_id) of targets of the artifact, in the order of a predictor for them."""
        unit_ids = self.source.units.column("unit_id").to_pylist()
        return tuple((target, unit_ids[e]) for target in targets for e in self.source.unit_columns(target))

    def changes(self, predictor: Predictor) -> tuple[F64, F64]:
        """Predict the changes of the subsets, (B, T), and of units, (B, E); without columns if there are no units."""
        sums = [predictor.sums(block.weights) for block in self.blocks]
        task_BT = np.concatenate([predictor.change_of(subset_sums) for subset_sums in sums])
        if predictor.unit_level is None:
            return task_BT, np.empty((len(task_BT), 0))
        pairs = zip(self.blocks, sums, strict=True)
        return task_BT, np.concatenate(
            [predictor.unit_change(block.weights, subset_sums) for block, subset_sums in pairs]
        )

    def predictions(self, method: str, artifact_targets: Sequence[str], task_BT: F64, unit_BE: F64) -> Predictions:
        """Return predictions of targets and units under the target names of the runs.

        Args:
            method: name of the method.
            artifact_targets: names of the targets in the artifact.
            task_BT: predictions of targets.
            unit_BE: predictions of units; without columns if there are none.
        """
        return Predictions(
            method=method,
            subset_ids=tuple(name for block in self.blocks for name in block.subset_ids),
            units=tuple((self.run_targets[target], unit) for target, unit in self.units(artifact_targets))
            if unit_BE.shape[1]
            else (),
            values_BE=unit_BE,
            task_B={self.run_targets[target]: task_BT[:, t] for t, target in enumerate(artifact_targets)},
        )

    def additive(self, protocols: Mapping[str, ScoringProtocol], targets: Sequence[str]) -> list[Predictions]:
        """Predict targets and units with additive protocols, as `grasp predict` does.

        Args:
            protocols: protocols by the name of the method.
            targets: names of the targets in the runs.
        """
        artifact_targets, results = self.artifact_targets_of(targets), []
        for name, protocol in protocols.items():
            predictor = Predictor.from_artifact(self.source, protocol, artifact_targets, per_unit=True)
            predictions = self.predictions(name, artifact_targets, *self.changes(predictor))
            results.append(replace(predictions, cost=read_cost(protocol.arrays, self.source)))
        return results


def read_cost(arrays: Iterable[str], artifact: ArtifactReader) -> Cost:
    """Return the number of floats per row that a predictor reads (relevance and sketches), and the build time.

    The time is that of the whole build, including tokenization, which serves all predictors of the artifact.
    """
    width = {name: artifact.manifest.arrays[name].width for name in arrays if name in artifact.array_names}
    scores = sum(size for name, size in width.items() if name.startswith("relevance_"))
    seconds = artifact.manifest.details.get("build_seconds") or {}
    return Cost(sum(width.values()) - scores, scores, seconds.get("wall"), seconds.get("cpu"))


# ------------------------------------------------------------------------------------------------- imported runs


class ImportedRuns(TrainingRuns):
    """Imported runs whose subsets are expressed in the rows of an artifact."""

    def __init__(self, table: RunTable, artifact: ArtifactReader, path: Path) -> None:
        """Express imported runs in the rows and targets of an artifact.

        Raises:
            RunsError: no metric is named after a target of the artifact; the artifact lacks a value, row or document;
                or the runs have several model sizes.
        """
        metric_of: dict[str, str] = {}  # by target: the metric with its name, preferably a loss
        for target in artifact.targets:
            if of_target := [name for name in table.metrics if name == target or name.startswith(f"{target}/")]:
                metric_of[target] = next((name for name in of_target if "loss" in name), of_target[0])
        if not metric_of:
            raise RunsError(
                f"{table.name}: has metrics {', '.join(table.metrics[:MAX_LISTED])}, the artifact has targets "
                f"{', '.join(artifact.targets)}; a metric must be named after its target, e.g. sciq or sciq/acc"
            )
        loss_on = artifact.manifest.settings.get("targets", {}).get("loss_on", "completion")
        fingerprints = unit_fingerprints(artifact, loss_on)
        columns = [table.metrics.index(name) for name in metric_of.values()]
        self.values_RST = table.utility_RST()[:, :, columns]
        digest = hashlib.blake2b(table.weights_RG().tobytes() + self.values_RST.tobytes(), digest_size=16)
        has_all_seeds = not np.isnan(self.values_RST).any()
        super().__init__(
            path,
            RetrainedRunsInfo(
                role="dev",
                recipe="imported",
                recipe_settings={"runs": digest.hexdigest()},
                seeds=tuple(range(self.values_RST.shape[1] if has_all_seeds else 1)),
                corpus_fingerprint=artifact.manifest.fingerprints.get("corpus", "none"),
                n_rows=artifact.n_rows,
                targets={
                    target: TargetInfo(fingerprint=fingerprints[target], loss_on=loss_on, unit_ids=(WHOLE_TASK,))
                    for target in metric_of
                },
                subset_ids=table.runs,
                masks_checksum="",
                reference=False,
            ),
        )
        self._subsets, notes = row_weights(table, artifact)
        renamed = [f"{target}: {name}" for target, name in metric_of.items() if name != target]
        self.notes = [f"metrics of the runs: {'; '.join(renamed)}"] if renamed else []
        self.notes += [*notes, "the runs only have results of whole tasks, so metrics of single units are undefined"]
        units = set()  # nats, or the name of the metric, with the prefix `less_` if lower is better
        for target, metric in metric_of.items():
            short_name = metric.removeprefix(target).strip("/").lower()
            prefix = "less_" if table.info.metrics[metric] == "lower" else ""
            units.add("nats" if re.search(NATS, short_name) else prefix + (re.sub(r"\W+", "_", short_name) or "metric"))
        self.unit = units.pop() if len(units) == 1 else "metric"
        changes = {"lower": "decrease of", "higher": "increase of"}
        metrics = ", ".join(f"{changes[table.info.metrics[name]]} {name}" for name in metric_of.values())
        self._measurement = f"{metrics} (above 0 is better)", f"by the {len(table)} runs of {path.name}"
        self._label = table.info.label

    @property
    def measurement(self) -> tuple[str, str]:
        return self._measurement

    @property
    def label(self) -> str | None:
        return self._label

    def pending(self) -> tuple[Run, ...]:
        return ()

    def subset_blocks(
        self, rows: RowIndex, labels: LabelColumn | None = None, *, block: int = BLOCK_SUBSETS
    ) -> Iterator[SubsetBlock]:
        yield from self._subsets

    def task_utilities(self, targets: Sequence[str]) -> F64:
        return self.values_RST[:, :, [self.targets.index(name) for name in targets]]

    def _utilities_RE(self) -> F64:  # noqa: N802 - a shape suffix
        values_RST = self.values_RST
        if len(self.info.seeds) < values_RST.shape[1] or np.isnan(values_RST).any():
            # some runs lack seeds: use the mean of the available ones
            values_RST = np.nanmean(values_RST, axis=1, keepdims=True)
        return values_RST.swapaxes(0, 1).reshape(-1, values_RST.shape[2])


def bind_runs(artifact: ArtifactReader, runs: TrainingRuns | RunTable | Path | str) -> TrainingRuns:
    """Return retrained runs as they are, and imported ones with their subsets in the rows of the artifact.

    Args:
        artifact: artifact of the corpus of the runs.
        runs: opened runs, or the directory that holds them.
    """
    opened = runs if isinstance(runs, TrainingRuns) else open_runs(runs)
    if isinstance(opened, TrainingRuns):
        return opened
    return ImportedRuns(opened, artifact, Path(runs) if isinstance(runs, Path | str) else Path(opened.name))


def row_weights(runs: RunTable, artifact: ArtifactReader) -> tuple[list[SubsetBlock], list[str]]:
    """Convert the weights of runs to weights of the rows of an artifact.

    Returns:
        Subsets in the order of the runs, and notes.
    Raises:
        RunsError: the artifact lacks a value, row or document.
    """
    table = LabelTable(artifact.rows_path)
    if runs.info.kind == "rows":
        return _by_rows(runs, table, RowIndex.from_parquet(artifact.rows_path))
    weight_RG = runs.weights_RG()
    if runs.info.kind == "expressions":  # weights are added up for rows that match several expressions
        masks_GN = [table.matching(expression).mask_N for expression in runs.values]

        def weighted_rows() -> Iterator[WeightedRows]:
            for run, weight_G in zip(runs.runs, weight_RG, strict=True):
                weight_N = np.sum([weight * mask_N for weight, mask_N in zip(weight_G, masks_GN, strict=True)], axis=0)
                retained = np.flatnonzero(weight_N)
                yield WeightedRows(run, retained, weight_N[retained])

        return list(in_blocks(weighted_rows(), artifact.n_rows, BLOCK_SUBSETS)), []
    assert runs.info.label is not None
    try:
        column = table.column(runs.info.label)
    except SubsetError as err:
        raise RunsError(f"{runs.name}: {err}; import the runs again with --label LABEL") from err
    code_of = {name: code for code, name in enumerate(column.names())}
    # a prefix that all names in the table share may be missing in the labels, e.g. train_arxiv, train_github
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(min(runs.values), max(runs.values), strict=False))
    common_prefix = "".join(letter for letter, _ in pairs)
    spellings = (list(runs.values), [name.removeprefix(common_prefix) for name in runs.values])
    names = next((names for names in spellings if all(name in code_of for name in names)), None)
    if names is None:
        missing = [name for name in runs.values if name not in code_of]
        raise RunsError(
            f"{runs.name}: {len(missing)} values of {runs.info.label} are not in the artifact: "
            f"{', '.join(missing[:MAX_LISTED])}; it has {', '.join(list(code_of)[:MAX_LISTED])}"
        )
    codes = [code_of[name] for name in names]
    factor_RG = np.zeros((len(runs), len(column.values)))
    factor_RG[:, codes] = weight_RG
    if runs.info.kind == "shares":  # weight of a row: share of its value in the mixture over its share in the corpus
        factor_RG *= artifact.n_rows / np.maximum(column.counts, 1)
    unseen = [name for name, code in code_of.items() if code not in codes]
    notes = (
        [f"{len(unseen)} values of {column.name} do not occur in any run: {', '.join(unseen[:MAX_LISTED])}"]
        if unseen
        else []
    )
    return [SubsetBlock(runs.runs, Weights.from_slices(column.codes_N, factor_RG.shape[1]).mixed(factor_RG))], notes


def _by_rows(runs: RunTable, table: LabelTable, index: RowIndex) -> tuple[list[SubsetBlock], list[str]]:
    """Convert weights by document id if all names are documents, otherwise by row id; return notes as well.

    The first row of a document that is split has the name of the document, but only documents can be listed without
    names such as `NAME#1`.
    """
    names = [str(row_id) for row_id in index.ids().to_pylist()]
    rows_of_name: dict[str, list[int]] = {name: [n] for n, name in enumerate(names)}
    notes: list[str] = []
    if "doc_id" in table.columns:
        column = table.column("doc_id")
        order = np.argsort(column.codes_N, kind="stable")
        rows_of_document = np.split(order, np.cumsum(column.counts)[:-1])
        documents = {str(name): rows.tolist() for name, rows in zip(column.values, rows_of_document, strict=True)}
        if all(name in documents for name in runs.values):
            rows_of_name = documents
            if (n_rows := sum(len(rows_of_name[name]) for name in runs.values)) > len(runs.values):
                notes.append(f"the names are read as {len(runs.values):,} documents, with {n_rows:,} rows")
    missing = [name for name in runs.values if name not in rows_of_name]
    if missing:
        raise RunsError(
            f"{runs.name}: {len(missing)} rows or documents are not in the artifact: {', '.join(missing[:MAX_LISTED])}"
        )
    per_run: dict[str, tuple[list[int], list[float]]] = {run: ([], []) for run in runs.runs}
    lines = (runs.trained[column].to_pylist() for column in ("run", "name", "weight"))
    for run, name, weight in zip(*lines, strict=True):
        per_run[run][0].extend(rows_of_name[name])
        per_run[run][1].extend([weight] * len(rows_of_name[name]))
    subsets: Iterable[WeightedRows] = (
        WeightedRows(run, np.array(rows)[order], np.array(weights)[order])
        for run, (rows, weights) in per_run.items()
        for order in [np.argsort(rows)]
    )
    return list(in_blocks(subsets, index.n_rows, BLOCK_SUBSETS)), notes
