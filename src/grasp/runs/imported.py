"""Imported runs seen from an artifact: an environment whose subsets and results come from a table of runs.

A run belongs to documents: its weights become weights of the artifact's rows, its metrics results of the targets that
they are called by. So whatever reads an environment reads imported runs.
Shape letters: R runs, S seeds, T targets.
"""

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.errors import EnvironmentDataError, SubsetError
from grasp.predict.labels import LabelColumn, LabelTable
from grasp.predict.subset_tables import RowIndex
from grasp.predict.weights import SubsetBlock, WeightedRows, Weights, in_blocks
from grasp.runs.environment import Environment, EnvironmentInfo, Run, TargetInfo
from grasp.runs.joined import unit_fingerprints
from grasp.runs.predictions import WHOLE_TASK
from grasp.runs.table import NAMED, RunTable, open_runs

BLOCK = 256
NATS = r"(^|_)(loss|nll|ce)($|_)|loss$"  # metrics that are nats a token


class ImportedRuns(Environment):
    """An environment in memory, all of its runs there."""

    def __init__(self, table: RunTable, artifact: ArtifactReader, path: Path) -> None:
        """Bind runs to an artifact.

        Raises:
            EnvironmentDataError: no metric is called by a target of the artifact; a value, row or document that the
                artifact lacks; runs of several sizes.
        """
        metric_of = _metrics(table, artifact.targets)
        loss_on = artifact.manifest.settings.get("targets", {}).get("loss_on", "completion")
        known = unit_fingerprints(artifact, loss_on)
        columns = [table.metrics.index(name) for name in metric_of.values()]
        self.values_RST = table.utility_RST()[:, :, columns]
        digest = hashlib.blake2b(table.weights_RG().tobytes() + self.values_RST.tobytes(), digest_size=16)
        each_seed = not np.isnan(self.values_RST).any()
        super().__init__(
            path,
            EnvironmentInfo(
                role="dev",
                recipe="imported",
                recipe_settings={"runs": digest.hexdigest()},
                seeds=tuple(range(self.values_RST.shape[1] if each_seed else 1)),
                corpus_fingerprint=artifact.manifest.fingerprints.get("corpus", "none"),
                n_rows=artifact.n_rows,
                targets={
                    target: TargetInfo(fingerprint=known[target], loss_on=loss_on, unit_ids=(WHOLE_TASK,))
                    for target in metric_of
                },
                subset_ids=table.runs,
                masks_checksum="",
                reference=False,
            ),
        )
        self._subsets, said = row_weights(table, artifact)
        same = [f"{target}: {name}" for target, name in metric_of.items() if name != target]
        self.notes = [f"metrics of the runs: {'; '.join(same)}"] if same else []
        self.notes += [*said, "the runs have results of whole tasks, so what is made of single units is undefined"]
        self.unit = _unit(table, metric_of)
        metrics = ", ".join(metric_of.values())
        self.described = f"{metrics} (above 0 is better)", f"by the {len(table)} runs of {path.name}"
        self.label = table.info.label

    def pending(self) -> tuple[Run, ...]:
        return ()

    def subset_blocks(
        self, rows: RowIndex, labels: LabelColumn | None = None, *, block: int = BLOCK
    ) -> Iterator[SubsetBlock]:
        yield from self._subsets

    def task_utilities(self, targets: Sequence[str]) -> F64:
        return self.values_RST[:, :, [self.targets.index(name) for name in targets]]

    def _values(self) -> F64:
        values_RST = self.values_RST
        if len(self.info.seeds) < values_RST.shape[1] or np.isnan(values_RST).any():
            values_RST = np.nanmean(values_RST, axis=1, keepdims=True)  # some runs lack some seeds
        return values_RST.swapaxes(0, 1).reshape(-1, values_RST.shape[2])


def runs_beside(artifact: ArtifactReader, runs: Environment | RunTable | Path | str) -> Environment:
    """Retrained or imported runs, or the directory that holds them, as an environment beside an artifact."""
    found = open_runs(runs)
    if isinstance(found, Environment):
        return found
    return ImportedRuns(found, artifact, Path(runs) if isinstance(runs, Path | str) else Path(found.name))


def _metrics(table: RunTable, targets: Iterable[str]) -> dict[str, str]:
    """The metric of each target: one that is called by it, losses first."""
    targets, found = list(targets), {}
    for target in targets:
        fitting = [name for name in table.metrics if name == target or name.startswith(f"{target}/")]
        if fitting:
            found[target] = next((name for name in fitting if "loss" in name), fitting[0])
    if not found:
        raise EnvironmentDataError(
            f"{table.name}: has the metrics {', '.join(table.metrics[:NAMED])}, asked are {', '.join(targets)}; a "
            "metric belongs to the target it is called by, e.g. sciq or sciq/acc"
        )
    return found


def _unit(table: RunTable, metric_of: Mapping[str, str]) -> str:
    """What columns are called: nats, or by the metric; that of which less is better begins with `less_`."""
    names = {
        "nats"
        if re.search(NATS, short := name.removeprefix(target).strip("/").lower())
        else ("less_" if table.info.metrics[name] == "lower" else "") + (re.sub(r"\W+", "_", short) or "metric")
        for target, name in metric_of.items()
    }
    return names.pop() if len(names) == 1 else "metric"


# ------------------------------------------------------------------------------------------- what was trained on


def row_weights(runs: RunTable, artifact: ArtifactReader) -> tuple[list[SubsetBlock], list[str]]:
    """Weights of the artifact's rows in every run, in order; and what should be known of them.

    Raises:
        EnvironmentDataError: a value, row or document that the artifact lacks.
    """
    table = LabelTable(artifact.rows_path)
    if runs.info.kind == "rows":
        return _by_rows(runs, table, RowIndex.from_parquet(artifact.rows_path)), []
    weight_RG = runs.weights_RG()
    if runs.info.kind == "expressions":  # they add up: a row that two of them match has both weights
        masks_GN = [table.matching(expression).mask_N for expression in runs.values]

        def added_up() -> Iterator[WeightedRows]:
            for run, weight_G in zip(runs.runs, weight_RG, strict=True):
                weight_N = np.sum([weight * mask_N for weight, mask_N in zip(weight_G, masks_GN, strict=True)], axis=0)
                kept = np.flatnonzero(weight_N)
                yield WeightedRows(run, kept, weight_N[kept])

        return list(in_blocks(added_up(), artifact.n_rows, BLOCK)), []
    assert runs.info.label is not None
    try:
        column = table.column(runs.info.label)
    except SubsetError as err:
        raise EnvironmentDataError(f"{runs.name}: {err}") from err
    code_of = {name: code for code, name in enumerate(column.names())}
    # what all the names in the table begin with may be left off, as in train_arxiv, train_github
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(min(runs.values), max(runs.values), strict=False))
    common = "".join(letter for letter, _ in pairs)
    spellings = (list(runs.values), [name.removeprefix(common) for name in runs.values])
    names = next((names for names in spellings if all(name in code_of for name in names)), None)
    if names is None:
        lacking = [name for name in runs.values if name not in code_of]
        raise EnvironmentDataError(
            f"{runs.name}: {len(lacking)} values of {runs.info.label} are not in the artifact: "
            f"{', '.join(lacking[:NAMED])}; it has {', '.join(list(code_of)[:NAMED])}"
        )
    place = [code_of[name] for name in names]
    factor_RG = np.zeros((len(runs), len(column.values)))
    factor_RG[:, place] = weight_RG
    if runs.info.kind == "shares":
        factor_RG *= artifact.n_rows / np.maximum(column.counts, 1)
    unseen = [name for name, code in code_of.items() if code not in place]
    said = [f"{len(unseen)} values of {column.name} are in no run: {', '.join(unseen[:NAMED])}"] if unseen else []
    return [SubsetBlock(runs.runs, Weights.from_slices(column.codes_N, factor_RG.shape[1]).mixed(factor_RG))], said


def _by_rows(runs: RunTable, table: LabelTable, index: RowIndex) -> list[SubsetBlock]:
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
    return list(in_blocks(subsets, index.n_rows, BLOCK))
