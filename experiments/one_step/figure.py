"""The figure: rank correlation by learning rate, and predicted against realized utilities of subsets."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.one_step.measure import Measured
from experiments.one_step.predictors import label

COLOURS = {
    "taylor-1": "#1f77b4",
    "taylor-2": "#ff7f0e",
    "sketch-1": "#c5b0d5",
    "sketch-2": "#9467bd",
    "head-1": "#7f7f7f",
    "grasp-pooled": "#2ca02c",
    "grasp-token": "#d62728",
}
OTHER = "#8c564b"
Lines = Sequence[Mapping[str, Any]]


def draw(shapley: Lines, subsets: Lines, measured: Sequence[Measured], scatter_rate: float, path: Path) -> None:
    """Write the figure: one row of panels a state of training; the format is the ending of `path`."""
    states = list(dict.fromkeys(line["steps"] for line in subsets))
    with mpl.rc_context({"svg.hashsalt": "one-step", "font.size": 8, "svg.fonttype": "none"}):
        figure = Figure(figsize=(13.0, 3.6 * len(states)), layout="constrained")
        axes = figure.subplots(len(states), 3, squeeze=False)
        for row, steps in zip(axes, states, strict=True):
            what = "at initialisation" if steps == 0 else f"after {steps} steps"
            _correlations(row[0], [line for line in shapley if line["steps"] == steps])
            row[0].set_title(f"Shapley values of 16 rows, {what}")
            _correlations(row[1], [line for line in subsets if line["steps"] == steps])
            row[1].set_title(f"utilities of subsets of 8 rows, {what}")
            _scatter(row[2], [game for game in measured if (game.case.steps, game.rate) == (steps, scatter_rate)])
            row[2].set_title(f"learning rate {scatter_rate:g}, {what}")
        handles, labels = axes[0][1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _correlations(axes: Axes, lines: Lines) -> None:
    if not lines:
        axes.text(0.5, 0.5, "not sampled", ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    for name in dict.fromkeys(line["predictor"] for line in lines):
        points = sorted((line for line in lines if line["predictor"] == name), key=lambda line: line["rate"])
        rates = [line["rate"] for line in points]
        mean = np.array([line["mean_loss"]["mean"] for line in points])
        error = np.array([line["mean_loss"]["standard_error"] or 0.0 for line in points])
        axes.errorbar(
            rates,
            mean,
            error,
            color=COLOURS.get(name, OTHER),
            label=label(name),
            marker="o",
            ms=3,
            lw=1.2,
            ecolor="black",
        )
    axes.set_xscale("log")
    axes.set_ylim(top=1.03)
    axes.axhline(0.0, color="black", lw=0.5)
    axes.set_xlabel("learning rate")
    axes.set_ylabel("Spearman correlation")


def _scatter(axes: Axes, measured: Sequence[Measured]) -> None:
    for name in ("sketch-2", "taylor-2"):
        predicted = np.concatenate([game.predicted[name][:, -1] for game in measured])
        realized = np.concatenate([game.realized[:, -1] for game in measured])
        axes.scatter(predicted, realized, s=4, color=COLOURS[name], label=label(name), linewidths=0)
    ends = [float(realized.min()), float(realized.max())]
    axes.plot(ends, ends, color="black", lw=0.8, ls="--")
    axes.set_xlabel("predicted utility, nats")
    axes.set_ylabel("realized utility, nats")
