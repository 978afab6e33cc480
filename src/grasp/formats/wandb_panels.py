"""Panels that wandb exported as CSV: `Step, <run> - <metric>, <run> - <metric>__MIN, ...`, one line per step."""

import numpy as np
import pyarrow as pa

from grasp.runs.table import float_column


def claims(table: pa.Table) -> str:
    """Return why a table of runs is a panel: its first column is the step."""
    is_panel = table.column_names and table.column_names[0].lower() in ("step", "_step")
    return f"its first column is {table.column_names[0]}" if is_panel else ""


def read(table: pa.Table) -> pa.Table:
    """Convert a panel to a table with one line per run, with the last finite value of each metric."""
    last_values: dict[str, dict[str, float]] = {}  # by run and metric
    for name in table.column_names[1:]:
        run, _, metric = name.rpartition(" - ")
        if not run or metric.endswith(("__MIN", "__MAX")):
            continue
        values = float_column(table[name])
        finite = values[np.isfinite(values)] if values is not None else np.empty(0)
        last_values.setdefault(run, {})[metric] = float(finite[-1]) if finite.size else float("nan")
    metrics = list(dict.fromkeys(metric for metrics_of_run in last_values.values() for metric in metrics_of_run))
    columns = {
        metric: pa.array([metrics_of_run.get(metric, float("nan")) for metrics_of_run in last_values.values()])
        for metric in metrics
    }
    return pa.table({"run": pa.array(list(last_values)), **columns})
