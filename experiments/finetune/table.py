"""The comparisons of all environments as the table of the page: mean LDS, its difference to what ships, task rho.

python -m experiments.finetune.table
"""

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BEGIN, END = "<!-- table -->\n", "<!-- end -->\n"
TITLES = {
    "token + input + shift + tilt": "**token + input + shift + tilt (what ships)**",
    "token + input + shift": "token + input + shift (shipped before)",
    "token + input": "token + input (shipped at first)",
    "pooled": "pooled (the paper)",
    "neighbour": "neighbour (kernel LM)",
    "repsim": "RepSim",
    "betr": "BETR: nearest example of the target",
    "bm25": "BM25",
    "ngram": "n-gram language model",
    "loss": "loss, low first",
    "tracin": "TracIn, last block",
    "trak": "TRAK, last block",
    "less": "LESS, last block",
    "influence of the last layer": "last layer, K-FAC",
    "ridge on the other runs": "*no competitor: ridge on the other runs*",
    "ekfac": "EK-FAC, last block",
}
TARGETS = {"sciq": "SciQ", "arc_easy": "ARC", "hellaswag": "HellaSwag", "instructions": "instr."}


def table(report: dict[str, Any]) -> str:
    """An environment's scores, best first, as Markdown."""
    targets = report["targets"]
    title = f"`{report['environment']}`, {report['subsets']} subsets"
    head = [title, "mean LDS", "to what ships", *(TARGETS[target] for target in targets), "task rho"]
    lines = [head, ["---"] * len(head)]
    for method in sorted(report["methods"], key=lambda one: -one["mean_lds"][0]):
        if method["method"].endswith("(negative x .25)"):
            continue
        difference = _interval(method["difference"]) if method["difference"] else ""
        of_targets = [_number(method["mean_lds_of_target"][target]) for target in targets]
        name = TITLES.get(method["method"], method["method"])
        lines.append([name, _interval(method["mean_lds"]), difference, *of_targets, _interval(method["task_rho"])])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _interval(values: list[float]) -> str:
    return f"{_number(values[0])} [{_number(values[1])}, {_number(values[2])}]"


def _number(value: float) -> str:
    return f"{value:.2f}".replace("0.", ".")


def main() -> None:
    """Write it into the page."""
    page = HERE / "README.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    reports = [json.loads((HERE / f"{name}.json").read_text()) for name in ("documents", "lengths", "instructions")]
    after = rest.partition(END)[2]
    page.write_text(before + BEGIN + "\n".join(map(table, reports)) + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
