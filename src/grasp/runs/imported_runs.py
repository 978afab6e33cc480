"""Bind imported runs to an artifact: subsets in its rows, and metrics as utilities of its targets.

A `RunTable` does not depend on an artifact: its weights are those of label values, rows or documents, and its metrics
have names. Here the weights become row weights, and a metric becomes the utility of the target that it is
named after, so that all code for `TrainingRuns` accepts imported runs. Start with `bind_runs`.
Shape letters: R runs, S seeds, T targets, N rows, G label values.
"""

import hashlib
import itertools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from grasp.artifact.label_table import LabelTable
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import row_amounts
from grasp.errors import RunsError, SubsetError
from grasp.predict.subset_tables import RowIndex, read_subsets
from grasp.predict.weights import SubsetBlock, Weights
from grasp.runs.alignment import unit_fingerprints
from grasp.runs.metric_names import LOSS, metric_kind
from grasp.runs.predictions import WHOLE_TASK
from grasp.runs.table import MAX_LISTED, RunTable, open_runs
from grasp.runs.training_runs import TargetInfo, TrainingRuns


def bind_runs(artifact: ArtifactReader, runs: TrainingRuns | Path | str) -> TrainingRuns:
    """Return retrained runs as they are, and imported ones with their subsets in the rows of the artifact.

    Bound runs are described as if they had been retrained on the corpus of the artifact.

    Args:
        artifact: artifact of the corpus of the runs.
        runs: opened runs, or the directory that holds them.
    Raises:
        RunsError: as `table.open_runs`; no metric is named after a target of the artifact; the artifact lacks a value,
            row or document; or the runs have several model sizes.
    """
    table = open_runs(runs)
    if not isinstance(table, RunTable) or table.blocks:
        return table
    # the metric of each target that has one: `sciq` or `sciq/...`, preferably one that varies, and a loss
    metric_of_target: dict[str, str] = {}
    constant = table.constant_metrics()
    for target in artifact.targets:
        if names := [name for name in table.metrics if name == target or name.startswith(f"{target}/")]:
            names.sort(key=lambda name: (name in constant, metric_kind(name.removeprefix(target)) != LOSS))
            metric_of_target[target] = names[0]
    if not metric_of_target:
        raise RunsError(
            f"{table.name}: has metrics {', '.join(table.metrics[:MAX_LISTED])}, the artifact has targets "
            f"{', '.join(artifact.targets)}; a metric must be named after its target, e.g. sciq or sciq/acc"
        )
    utility_RST = table.utility_RST()[:, :, [table.metrics.index(metric) for metric in metric_of_target.values()]]
    blocks, subset_notes = row_weights(table, artifact)
    loss_on = artifact.manifest.settings.get("targets", {}).get("loss_on", "completion")
    fingerprints = unit_fingerprints(artifact, loss_on)
    # The recipe is unknown, so the fingerprint of the runs is that of their weights and results.
    digest = hashlib.blake2b(table.weights_RG().tobytes() + utility_RST.tobytes(), digest_size=16)
    every_run_has_every_seed = not np.isnan(utility_RST).any()
    record = {
        "recipe_settings": {"runs": digest.hexdigest()},
        "seeds": tuple(range(utility_RST.shape[1] if every_run_has_every_seed else 1)),
        "corpus_fingerprint": artifact.manifest.fingerprints.get("corpus", "none"),
        "n_rows": artifact.n_rows,
        "targets": {
            target: TargetInfo(fingerprint=fingerprints[target], loss_on=loss_on, unit_ids=(WHOLE_TASK,))
            for target in metric_of_target
        },
        "subset_ids": table.runs,
    }
    renamed = [f"{target}: {metric}" for target, metric in metric_of_target.items() if metric != target]
    # Units of the utilities: nats or the name of the metric. Its prefix is `less_` if lower is better, since utilities
    # are then its negative.
    units = set()
    for target, metric in metric_of_target.items():
        short_name = metric.removeprefix(target).strip("/").lower()
        prefix = "less_" if table.info.metrics[metric] == "lower" else ""
        units.add("nats" if metric_kind(short_name) == LOSS else prefix + (re.sub(r"\W+", "_", short_name) or "metric"))
    changes = {"lower": "decrease of", "higher": "increase of"}
    metrics = ", ".join(f"{changes[table.info.metrics[metric]]} {metric}" for metric in metric_of_target.values())
    return replace(
        table,
        info=table.info.model_copy(update=record),
        notes=(
            *([f"metrics of the runs: {'; '.join(renamed)}"] if renamed else []),
            *subset_notes,
            "the runs only have results of whole tasks, so metrics of single units are undefined",
        ),
        unit=units.pop() if len(units) == 1 else "metric",
        metric_of_target=metric_of_target,
        measurement=(f"{metrics} (above 0 is better)", f"by the {len(table)} runs of {table.name}"),
        blocks=tuple(blocks),
    )


def row_weights(runs: RunTable, artifact: ArtifactReader) -> tuple[list[SubsetBlock], list[str]]:
    """Convert the weights of runs to weights of the rows of an artifact.

    Returns:
        Subsets in the order of the runs, and notes.
    Raises:
        RunsError: the artifact lacks a value, row or document.
    """
    table = LabelTable(artifact.rows_path)
    if runs.info.kind == "rows":
        return _weights_from_row_ids(runs, table, artifact)
    # weights of label values, which are shares of a mixture, or numbers of times that a value is seen
    assert runs.info.label is not None
    try:
        column = table.column(runs.info.label)
    except SubsetError as err:
        raise RunsError(f"{runs.name}: {err}; import the runs again with --label LABEL") from err
    code_of_value = {name: code for code, name in enumerate(column.names())}
    # A prefix that all names in the table share may be missing in the labels, e.g. of train_arxiv, train_github. It is
    # that of the first and the last name in alphabetical order.
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(min(runs.values), max(runs.values), strict=False))
    common_prefix = "".join(letter for letter, _ in pairs)
    names = list(runs.values)
    if missing := [name for name in names if name not in code_of_value]:
        names = [name.removeprefix(common_prefix) for name in names]
        if not all(name in code_of_value for name in names):
            raise RunsError(
                f"{runs.name}: {len(missing)} values of {runs.info.label} are not in the artifact: "
                f"{', '.join(missing[:MAX_LISTED])}; it has {', '.join(list(code_of_value)[:MAX_LISTED])}"
            )
    codes = [code_of_value[name] for name in names]
    factor_RG = np.zeros((len(runs), len(column.values)))
    factor_RG[:, codes] = runs.weights_RG()
    if runs.info.kind == "shares":  # weight of a row: share of its value in the mixture over its share in the corpus
        size_G = np.bincount(column.codes_N, row_amounts(artifact, runs.info.measure, column.codes_N))
        factor_RG *= size_G.sum() / np.maximum(size_G, 1)
    blocks = [SubsetBlock(runs.runs, Weights.from_slices(column.codes_N, factor_RG.shape[1]).mixed(factor_RG))]
    unseen = [name for name, code in code_of_value.items() if code not in codes]
    if not unseen:
        return blocks, []
    return blocks, [f"{len(unseen)} values of {column.name} do not occur in any run: {', '.join(unseen[:MAX_LISTED])}"]


def _weights_from_row_ids(
    runs: RunTable, table: LabelTable, artifact: ArtifactReader
) -> tuple[list[SubsetBlock], list[str]]:
    """Convert weights by document id if all names are documents, otherwise by row id.

    The first row of a document that is split has the name of the document, but only documents can be listed without
    names such as `NAME#1`.
    """
    index, trained, notes = RowIndex.from_parquet(artifact.rows_path), runs.trained, []
    if "doc_id" in table.columns:
        column = table.column("doc_id")
        document_N = np.array([str(value) for value in column.values], object)[column.codes_N]
        if set(runs.values) <= set(document_N):
            rows_of_document = pa.table({"row_id": document_N, "row": index.ids()}).to_pandas()
            frame = trained.to_pandas().merge(rows_of_document, on="row_id")
            trained = pa.table({"subset_id": frame["subset_id"], "row_id": frame["row"], "weight": frame["weight"]})
            n_rows = frame["row"].nunique()
            if n_rows > len(runs.values):
                notes.append(f"the names are read as {len(runs.values):,} documents, with {n_rows:,} rows")
    try:
        return list(read_subsets(trained, index)), notes
    except SubsetError as err:
        raise RunsError(f"{runs.name}: {err}") from err
