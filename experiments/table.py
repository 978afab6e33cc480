"""Averages over targets, method by method, from what `grasp evaluate --json` wrote, as Markdown.

    python experiments/table.py experiments/lds_main/*-completion.json --out experiments/lds_main/table.md

Intervals (95 %) are over subsets. A ceiling is what a predictor equal to the truth would reach against the mean of the
seeds; that of the task is the mean over the targets where the seeds agree at all.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

METRICS = {"task_rho": "task rho", "positive": "positive", "mean_lds": "mean LDS", "pairwise": "pairwise"}
CEILINGS = {"task_ceiling": "task rho", "lds_ceiling": "mean LDS"}
AVERAGE = "average"


def table(name: str, report: dict[str, Any]) -> str:
    """Return a heading, the ceilings, and one row per method."""
    records = report["results"]
    targets = [name for name in dict.fromkeys(record["target"] for record in records) if name != AVERAGE]
    shown = [record for record in records if record["target"] == (AVERAGE if len(targets) > 1 else targets[0])]
    return "\n".join(
        [
            f"## {name}",
            "",
            f"Environment {report['environment']}: {report['family']}, {report['n_subsets']} subsets, "
            + f"seeds {', '.join(map(str, report['seeds']))}.",
            f"{len(targets)} targets: {', '.join(_named(name, report['roles']) for name in targets)}. "
            + f"Ceilings: {ceilings(records, targets)}.",
            "",
            _line(("method", *METRICS.values())),
            _line(["---"] * (1 + len(METRICS))),
            *(_line((_method(record), *(_cell(record, metric) for metric in METRICS))) for record in shown),
            "",
        ]
    )


def _named(target: str, roles: dict[str, str]) -> str:
    return target if roles.get(target) == "held-out" else f"{target} ({roles.get(target, 'dev')})"


def ceilings(records: Sequence[dict[str, Any]], targets: Sequence[str]) -> str:
    """Mean ceilings over the targets that have one."""
    first = {name: next(record for record in records if record["target"] == name) for name in targets}
    parts = []
    for field, title in CEILINGS.items():
        known = [first[name][field] for name in targets if first[name][field] is not None]
        of = "" if len(known) == len(targets) else f" (of {len(known)} targets; undefined on the rest)"
        parts.append(f"{title} {sum(known) / len(known):.3f}{of}" if known else f"{title} undefined")
    return ", ".join(parts)


def _method(record: dict[str, Any]) -> str:
    return record["method"] if record["standing"] == "predictor" else f"{record['method']} ({record['standing']})"


def _cell(record: dict[str, Any], metric: str) -> str:
    if record[metric] is None:
        return "undefined"
    low, high = record[f"{metric}_low"], record[f"{metric}_high"]
    return f"{record[metric]:.3f}" + ("" if low is None else f" [{low:.3f}, {high:.3f}]")


def _line(parts: Sequence[str]) -> str:
    return "| " + " | ".join(parts) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="what `grasp evaluate --json` wrote")
    parser.add_argument("--title", default="Results")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    reports = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in args.results}
    text = f"# {args.title}\n\n" + "\n".join(table(*report) for report in reports.items())
    print(text, end="")
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
