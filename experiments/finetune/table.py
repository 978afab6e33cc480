"""The comparisons of several worlds as one table, best first by the worse of two: mean LDS over the best one there.

python -m experiments.finetune.table documents cc-topic > experiments/finetune/table.md
"""

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def shares(methods: list[dict[str, Any]]) -> dict[str, float]:
    """Mean LDS of each method as a share of the best one's."""
    best = max(method["mean_lds"][0] for method in methods)
    return {method["method"]: method["mean_lds"][0] / best for method in methods}


def table(reports: list[dict[str, Any]]) -> str:
    """Lines of Markdown; negative scores times .25 unless a name says otherwise."""
    by_name = [{method["method"]: method for method in report["methods"]} for report in reports]
    share_of = [shares(report["methods"]) for report in reports]
    common = [name for name in by_name[0] if all(name in names for names in by_name)]
    common.sort(key=lambda name: -min(share[name] for share in share_of))
    head = ["scores"]
    for report in reports:
        seeds = "one seed" if len(report["seeds"]) == 1 else f"{len(report['seeds'])} seeds"
        head += [
            f"{report['environment']}, {report['subsets']} subsets, {seeds}: mean LDS",
            "task rho",
            "to what ships",
        ]
    lines = [head, ["---"] * len(head)]
    lines += [[name, *(cell for names in by_name for cell in _cells(names[name]))] for name in common]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _cells(method: dict[str, Any]) -> list[str]:
    difference = method["difference"]
    return [_number(method["mean_lds"]), f"{method['task_rho'][0]:.2f}", _number(difference) if difference else ""]


def _number(values: list[float]) -> str:
    return f"{values[0]:.3f} [{values[1]:.3f}, {values[2]:.3f}]"


if __name__ == "__main__":
    print(table([json.loads((HERE / f"{name}.json").read_text()) for name in sys.argv[1:]]), end="")
