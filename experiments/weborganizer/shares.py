"""Category shares over checkpoints: which topics and formats a model asks for as it learns.

    python -m experiments.weborganizer.shares art-40 art-120 art-200 art-280 art --target sciq \
        --out experiments/weborganizer/shares.json

The artifacts are of checkpoints of one training run, oldest first, on one corpus.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.one_line_errors import in_one_line
from experiments.weborganizer.trends import LabelTrend, label_trends
from grasp.arrays import F64
from grasp.artifact.label_table import LabelTable
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import row_tokens
from grasp.extras import require
from grasp.files import write_atomically
from grasp.predict.slices import label_slices

SHOWN = 5  # of the categories that gain most and lose most
LABEL_GAP = 0.035  # between names, as a share of the range that is drawn


def measured(paths: Sequence[Path], labels: Sequence[str], target: str) -> tuple[list[LabelTrend], list[list[str]]]:
    """Shares of every category at every checkpoint, and the names of the categories."""
    artifacts = [ArtifactReader.open(path) for path in paths]
    rows, tokens_N = LabelTable(artifacts[-1].rows_path), row_tokens(artifacts[-1])
    slices = [label_slices(rows.column(label), tokens_N) for label in labels]
    names = [[part.name for part in label.slices] for label in slices]
    return list(label_trends(artifacts, slices, [target])), names


def described(trend: LabelTrend, names: Sequence[str]) -> dict[str, Any]:
    """Shares by category, checkpoint after checkpoint."""
    return {
        "label": trend.label,
        "kernel": trend.kernel,
        "checkpoints": list(trend.checkpoints),
        "share": {name: trend.share_CGT[:, g, 0].round(5).tolist() for g, name in enumerate(names)},
        "mean_relevance": {name: trend.mean_CGT[:, g, 0].tolist() for g, name in enumerate(names)},
    }


def of_all(trend: LabelTrend) -> F64:
    """Signed shares (C, G) whose absolute values add up to 1 at every checkpoint.

    Deviation from the paper's figure, whose shares add up to 1 on either side of 0: where a single category is below
    it, that category's share is -1 however small it is. Those shares are in the JSON.
    """
    mean_CG = trend.mean_CGT[:, :, 0]
    return np.asarray(mean_CG / np.abs(mean_CG).sum(axis=1, keepdims=True))


def spread(heights: F64, gap: float) -> F64:
    """Heights, highest first, moved down until they are `gap` apart."""
    out = np.array(heights)
    for i in range(1, len(out)):
        out[i] = min(out[i], out[i - 1] - gap)
    return out


def draw(trends: Sequence[LabelTrend], names: Sequence[Sequence[str]], target: str, path: Path) -> None:
    """One panel a label: the categories that help most and hurt most at the last checkpoint."""
    pyplot = require("matplotlib.pyplot", extra="experiments", feature="the figure")
    figure, axes = pyplot.subplots(1, len(trends), figsize=(6.5 * len(trends), 4), squeeze=False, layout="constrained")
    for axis, trend, slice_names in zip(axes[0], trends, names, strict=True):
        share_CG = of_all(trend)
        order = np.argsort(-share_CG[-1])
        chosen = list(dict.fromkeys([*order[:SHOWN].tolist(), *order[-SHOWN:].tolist()]))
        axis.axhline(0.0, color="0.5", linewidth=0.8)
        heights = spread(share_CG[-1, chosen], LABEL_GAP * np.ptp(share_CG[:, chosen]))
        for g, height in zip(chosen, heights, strict=True):
            line = axis.plot(share_CG[:, g], marker="o", markersize=3)[0]
            axis.annotate(
                slice_names[g], (len(share_CG) - 0.9, height), color=line.get_color(), fontsize=7, va="center"
            )
        axis.set_xticks(range(len(share_CG)), trend.checkpoints, rotation=20, fontsize=8)
        axis.set_xlim(-0.3, len(share_CG) + 1.2)
        low, high = axis.get_ylim()
        axis.set_ylim(min(low, heights.min() - 0.03 * (high - low)), high)
        axis.set_title(f"{trend.label}, {target}")
        axis.set_ylabel("share of all mean relevance, signed")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


@in_one_line()
def main(arguments: list[str] | None = None) -> None:
    """Parse, run, say what went wrong in one line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.weborganizer.shares", description=__doc__.splitlines()[0]
    )
    parser.add_argument("artifacts", type=Path, nargs="+", help="Artifacts of the checkpoints, oldest first.")
    parser.add_argument("--target", default="sciq", help="Whose relevance is shared out.")
    parser.add_argument("--by", default="topic,format", help="Labels, separated by commas.")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write; the figure goes beside it as SVG.")
    args = parser.parse_args(arguments)
    trends, names = measured(args.artifacts, args.by.split(","), args.target)
    draw(trends, names, args.target, args.out.with_suffix(".svg"))
    result = {"target": args.target, "labels": [described(*pair) for pair in zip(trends, names, strict=True)]}
    write_atomically(args.out, (json.dumps(result, indent=1) + "\n").encode())
    print(f"{args.out}, {args.out.with_suffix('.svg')}")


if __name__ == "__main__":
    main()
