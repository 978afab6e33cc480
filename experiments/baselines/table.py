"""All methods in one table: fidelity from `grasp evaluate --json`, averaged over targets, with floats a row, build time
and the time of a sweep. Intervals (95 %) are over subsets.

    python -m experiments.baselines.table experiments/baselines/cc-topic.json --rows 10482 --out experiments/baselines

The sweep sums what a method keeps over 100,000 subsets, each a random half of the rows, on one thread, in CPU seconds
scaled up from a few blocks: the stored scores of all units, and the features from which a unit that comes later is
scored (TRAK's 128 numbers at five checkpoints, say). One task's mean score is one float a row, as the paper counts
TracIn; that time stands above the table.

Shape letters: B subsets, N rows, C columns.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.table import AVERAGE, ceilings
from grasp.predict.weights import PackedMasks, RowSums, Weights

SUBSETS = 100_000
BLOCK, ROUNDS = 512, 3
SHOWN = {"task_rho": "task rho", "positive": "positive", "mean_lds": "mean LDS", "pairwise": "pairwise"}
HEADINGS = ("method", *SHOWN.values(), "floats a row", "build CPU s", "sweep, scores", "sweep, features")
STANDINGS = ("predictor", "oracle-selected", "supervised oracle")


def halves(n_rows: int, rng: np.random.Generator) -> Weights:
    """A block of random halves of the rows, (B, N)."""
    return Weights(PackedMasks(np.packbits(rng.random((BLOCK, n_rows)) < 0.5, axis=1), n_rows))


def sweep_seconds(width: int, n_rows: int) -> float:
    """CPU seconds of 100,000 subsets over `width` floats a row: the best of a few blocks, scaled up."""
    rng = np.random.default_rng(0)
    values_NC = rng.standard_normal((n_rows, width), dtype=np.float32)
    sweep, block = RowSums.over(values_NC), halves(n_rows, rng)
    sweep.sums(block)  # warm
    spent = []
    for _ in range(ROUNDS):
        begun = time.process_time()
        sweep.sums(block)
        spent.append(time.process_time() - begun)
    return min(spent) * SUBSETS / BLOCK


def widths(results: Sequence[dict[str, Any]]) -> set[int]:
    """Every number of floats a row that some method keeps."""
    recorded = {record[name] for record in results for name in ("score_floats", "feature_floats")}
    return {1, *(width for width in recorded if width)}


def cells(record: dict[str, Any], seconds: dict[int, float]) -> list[str]:
    """One line of the table."""
    features, scores = record["feature_floats"], record["score_floats"]
    floats = "-" if scores is None else f"{features} + {scores}" if features else str(scores)
    build = record["build_cpu_seconds"]
    return [
        record["method"],
        *(_with_interval(record, metric) for metric in SHOWN),
        floats,
        "-" if build is None else f"{build:.1f}",
        *("-" if not width else f"{seconds[width]:.2f}" for width in (scores, features)),
    ]


def _with_interval(record: dict[str, Any], metric: str) -> str:
    if record[metric] is None:
        return "-"
    low, high = record[f"{metric}_low"], record[f"{metric}_high"]
    return f"{record[metric]:.3f}" + ("" if low is None else f" [{low:.3f}, {high:.3f}]")


def shown(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Its averages over targets, or its only target's figures."""
    records: list[dict[str, Any]] = report["results"]
    several = any(record["target"] == AVERAGE for record in records)
    return [record for record in records if not several or record["target"] == AVERAGE]


def together(reports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reports of the same environment and targets as one; of a method that several have, the first counts."""
    merged: dict[tuple[str, ...], dict[str, Any]] = {}
    for report in reports:
        results = shown(report)
        targets = [name for name in dict.fromkeys(result["target"] for result in report["results"]) if name != AVERAGE]
        over = targets[0] if len(targets) == 1 else f"average of {len(targets)} tasks"
        new = {**report, "over": over, "results": [], "notes": [], "ceilings": ceilings(report["results"], targets)}
        into = merged.setdefault((report["environment"], *sorted(targets)), new)
        present = {record["method"] for record in into["results"]}
        into["results"] += [record for record in results if record["method"] not in present]
        into["notes"] += [note for note in report["notes"] if note not in into["notes"]]
    return list(merged.values())


def table(report: dict[str, Any], seconds: dict[int, float]) -> str:
    """Markdown; what is no predictor comes after what is, under its own heading."""
    lines = [
        f"## {report['environment']}, {report['over']}",
        "",
        f"{report['family']}, {report['n_subsets']} subsets, seeds {', '.join(map(str, report['seeds']))}. "
        f"Ceilings: {report['ceilings']}. 100,000 subsets over one float a row: {seconds[1]:.2f} s.",
    ]
    for standing in STANDINGS:
        results = [record for record in report["results"] if record["standing"] == standing]
        if results:
            lines += ["", f"### {standing}", "", _line(HEADINGS), _line(["---"] * len(HEADINGS))]
            lines += [_line(cells(record, seconds)) for record in results]
    return "\n".join([*lines, "", *(f"- {note}" for note in report["notes"])]) + "\n"


def _line(parts: Sequence[str]) -> str:
    return "| " + " | ".join(parts) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="what `grasp evaluate --json` wrote")
    parser.add_argument("--rows", type=int, required=True, help="rows of the corpus")
    parser.add_argument("--out", type=Path, required=True, help="directory of table.md and sweep.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    reports = together([json.loads(path.read_text(encoding="utf-8")) for path in args.results])
    wanted = sorted(set().union(*(widths(report["results"]) for report in reports)))
    seconds = {width: sweep_seconds(width, args.rows) for width in wanted}
    known = {"subsets": SUBSETS, "rows": args.rows, "retained": 0.5, "cpu_seconds_by_floats": seconds}
    (args.out / "sweep.json").write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    text = "# Every method\n\n" + "\n".join(table(report, seconds) for report in reports)
    (args.out / "table.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
