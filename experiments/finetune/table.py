"""The comparisons of both environments as one table, in the order of the first: mean LDS, target by target, task rho.

python -m experiments.finetune.table documents instructions > experiments/finetune/table.md
"""

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def table(reports: list[dict[str, Any]]) -> str:
    """Lines of Markdown, a part for each environment."""
    return "\n".join(_part(report) for report in reports)


def _part(report: dict[str, Any]) -> str:
    targets, ceiling = report["targets"], report["noise"]["ceiling"]
    seeds = "one seed" if len(report["seeds"]) == 1 else f"{len(report['seeds'])} seeds"
    bound = "no second seeds yet" if ceiling is None else f"a perfect score would reach {ceiling:.2f}"
    head = ["scores", *targets, "mean LDS", "to what ships", "task rho"]
    lines = [head, ["---"] * len(head)]
    for method in sorted(report["methods"], key=lambda one: -one["mean_lds"][0]):
        if method["method"].endswith("(negative x .25)"):
            continue
        of_targets = [f"{method['mean_lds_of_target'][target]:.2f}" for target in targets]
        difference = _number(method["difference"]) if method["difference"] else ""
        lines.append(
            [method["method"], *of_targets, _number(method["mean_lds"]), difference, _number(method["task_rho"])]
        )
    title = f"`{report['environment']}` ({report['role']}): {report['subsets']} subsets, {seeds}; {bound}."
    return "\n".join([title, "", *(f"| {' | '.join(line)} |" for line in lines), ""])


def _number(values: list[float]) -> str:
    return f"{values[0]:.2f} [{values[1]:.2f}, {values[2]:.2f}]"


if __name__ == "__main__":
    print(table([json.loads((HERE / f"{name}.json").read_text()) for name in sys.argv[1:]]), end="")
