"""The table of the page: task rho of scores by replays, a column an environment.

python -m experiments.replay.table
"""

import json
from pathlib import Path
from typing import Any

from experiments.finetune.table import put

FOLDER = Path(__file__).parent
TITLES = {
    "default": "the default rule",
    "all rows, all orders": "**all rows, mean of two orders**",
    "all rows, order 0": "all rows, order 0",
    "all rows, order 1": "all rows, order 1",
    "drawn rows, all orders": "drawn rows, mean of two orders",
    "drawn rows, order 0": "drawn rows, order 0",
    "drawn rows, order 1": "drawn rows, order 1",
    "both, all orders": "sum of all rows and drawn rows, mean of two orders",
    "all rows, all orders, with default": "all rows, mean of two orders, with the default rule",
    "both, all orders, with default": "the sum, with the default rule",
    "default + 0.5 replay": "the default rule + 0.5 of all rows",
    "default + 1 replay": "the default rule + 1 of all rows",
    "default + 2 replay": "the default rule + 2 of all rows",
    "default + 4 replay": "the default rule + 4 of all rows",
    "default + 8 replay": "the default rule + 8 of all rows",
    "all rows, 3 probe steps, all orders": "all rows, probe steps at 10, 50 and 90 %",
    "all rows, 3 probe steps, order 0": "all rows, the same, order 0",
    "all rows, 3 probe steps, order 1": "all rows, the same, order 1",
    "default + 4 replay, 3 probe steps, order 0": "**the default rule + 4 of the same, order 0**",
    "default + 4 replay, 3 probe steps, order 1": "the default rule + 4 of the same, order 1",
    "all rows, 2 probe steps, all orders": "all rows, probe steps at 30 and 70 %",
    "all rows, 1 probe steps, all orders": "all rows, one probe step at 50 %",
    "drawn rows, first third, all orders": "drawn rows, first third of the steps",
    "drawn rows, second third, all orders": "drawn rows, second third",
    "drawn rows, last third, all orders": "drawn rows, last third",
    "drawn rows, last two thirds, all orders": "drawn rows, last two thirds",
}


def table(reports: list[dict[str, Any]]) -> str:
    """Task rho and its difference to the default rule, with intervals, as Markdown."""
    head = ["rows scored by"]
    for entry in reports:
        ceiling = entry["noise"]["ceiling"]
        known = "ceiling not known" if ceiling is None else f"ceiling {_number(ceiling)}"
        head += [f"`{entry['environment']}`, {entry['subsets']} subsets, {known}", "less the default rule"]
    lines = [head, ["---"] * len(head)]
    for label, title in TITLES.items():
        cells = []
        for entry in reports:
            score = entry["scores"].get(label)
            cells += [_interval(score["task_rho"]), _interval(score["difference"])] if score else ["", ""]
        if any(cells):
            lines.append([title, *("" if label == "default" and k % 2 else cell for k, cell in enumerate(cells))])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _interval(values: list[float]) -> str:
    return f"{_number(values[0])} [{_number(values[1])}, {_number(values[2])}]"


def _number(value: float) -> str:
    return f"{value:.2f}".replace("0.", ".")


def main() -> None:
    """Write it into the page."""
    reports = json.loads((FOLDER / "result.json").read_text(encoding="utf-8"))["environments"]
    page = FOLDER / "README.md"
    page.write_text(put(page.read_text(encoding="utf-8"), "table", table(reports)), encoding="utf-8")


if __name__ == "__main__":
    main()
