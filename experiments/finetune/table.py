"""Write the comparisons of all environments to the page: mean LDS, difference to the built-in rule, task rho.

python -m experiments.finetune.table
"""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
TITLES = {
    "token + input + shift + tilt": "**token + input + shift + tilt (the forward pass alone)**",
    "token + input": "token + input (first default)",
    "pooled": "pooled (the paper)",
    "neighbour": "neighbour (kernel LM)",
    "repsim": "RepSim",
    "betr": "BETR: nearest example of the target",
    "bm25": "BM25",
    "ngram": "n-gram language model",
    "loss": "loss, low first",
    "tracin": "TracIn, last block, 128 numbers",
    "trak": "TRAK, last block, 128 numbers",
    "less": "LESS, last block, 128 numbers",
    "influence of the last layer": "last layer, K-FAC",
    "ridge on the other runs": "*no competitor: ridge on the other runs*",
    "ekfac": "EK-FAC, last block",
}
FORMS = {
    "gradient + .25 of token + input": "**gradient + .25 of token + input (built-in rule)**",
    "gradient + .25 of token + input, by task": "the same, token and input averaged over the task",
    "gradient": "gradient",
    "gradient of the mean loss": "gradient of the mean loss, not the sum",
    "gradient of the loss over the root of tokens": "gradient of the loss over the root of its tokens",
    "gradient + .125 of each": "gradient + .125 of each",
    "gradient + .5 of each": "gradient + .5 of each",
    "gradient + .25 of each": "gradient + .25 of each",
    "gradient + .25 of tilt": "gradient + .25 of tilt",
    "token + input + shift + tilt": "token + input + shift + tilt (previous default)",
}
STARTS = {
    "adapter: gradient": "the adapter before it is trained",
    "adapter: what ships": "the same, and a quarter each of token and input (built-in rule)",
    "start: gradient": "the original model",
    "start: what ships": "the same, and a quarter each of token and input (built-in rule)",
    "warm-up: gradient": "the original model after 12 steps on 96 rows",
    "warm-up: what ships": "the same, and a quarter each of token and input",
    "both: gradient": "the sum of the original model's and these",
    "token + input": "no gradients: token + input",
}
EKFAC = {
    f"EK-FAC, all layers, damping {damping}{loss}": f"damping {damping}{suffix}"
    for damping in (".1 of a layer's mean (as published)", ".01 of it")
    for loss, suffix in (("", ", a row's mean loss"), (", whole loss", ", its summed loss"))
}
TARGETS = {"sciq": "SciQ", "arc_easy": "ARC", "hellaswag": "HellaSwag", "instructions": "instr."}


def table(report: dict[str, Any]) -> str:
    """An environment's scores, best first, as Markdown."""
    targets = report["targets"]
    title = f"`{report['environment']}`, {report['subsets']} subsets"
    head = [title, "mean LDS", "to the forward pass", *(TARGETS[target] for target in targets), "task rho"]
    lines = [head, ["---"] * len(head)]
    for method in sorted(report["methods"], key=lambda record: -record["mean_lds"][0]):
        if method["method"].endswith("(negative x .25)"):
            continue
        difference = _interval(method["difference"]) if method["difference"] else ""
        of_targets = [_number(method["mean_lds_of_target"][target]) for target in targets]
        name = TITLES.get(method["method"], method["method"])
        lines.append([name, _interval(method["mean_lds"]), difference, *of_targets, _interval(method["task_rho"])])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def in_columns(reports: list[dict[str, Any]], titles: dict[str, str], head: str) -> str:
    """Mean LDS and task rho of some methods, a column an environment; one that no environment has is left out."""
    lines = [
        [head, *(f"`{report['environment']}`, {report['subsets']}" for report in reports)],
        ["---"] * (len(reports) + 1),
    ]
    for method, title in titles.items():
        matches = [next((m for m in report["methods"] if m["method"] == method), None) for report in reports]
        cells = [f"{_interval(m['mean_lds'])} / {_number(m['task_rho'][0])}" if m else "" for m in matches]
        lines += [[title, *cells]] if any(cells) else []
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def widths(report: dict[str, Any]) -> str:
    """Mean LDS of forms of gradients, a column for how many numbers are kept."""
    lds = {method["method"]: method["mean_lds"][0] for method in report["methods"]}
    variants = list(dict.fromkeys(name.partition(", ")[2] for name in lds))
    lines = [["numbers kept", *variants], ["---"] * (len(variants) + 1)]
    every = dict.fromkeys(name.partition(", ")[0] for name in lds)
    lines += [[form, *(_number(lds[f"{form}, {width}"]) for width in variants)] for form in every]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def runs_table(reports: list[dict[str, Any]]) -> str:
    """Task rho by the number of other runs, two lines an environment."""
    counts = sorted({line["runs"] for report in reports for line in report["found"] if line["runs"]})
    lines = [["task rho", "no runs", *(f"{count} runs" for count in counts)], ["---"] * (len(counts) + 2)]
    for report in reports:
        rho_of = {(line["by"], line["runs"]): _interval(line["task_rho"]) for line in report["found"]}
        relevance = rho_of["relevance alone", 0]
        for by, first in (("runs and relevance", relevance), ("runs alone", "")):
            lines.append([f"`{report['environment']}`, {by}", first, *(rho_of[by, count] for count in counts)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def put(page: str, name: str, text: str) -> str:
    """A page with what stands between the marks of a table replaced."""
    before, begin, rest = page.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition("<!-- end -->\n")
    assert begin, f"no place for {name}"
    assert end, f"no end of {name}"
    return before + begin + text + end + after


def _interval(values: list[float]) -> str:
    return f"{_number(values[0])} [{_number(values[1])}, {_number(values[2])}]"


def _number(value: float) -> str:
    return f"{value:.2f}".replace("0.", ".")


def main() -> None:
    """Write it into the page."""
    page = FOLDER / "README.md"

    def read(name: str) -> Any:
        return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))

    text = page.read_text(encoding="utf-8")
    text = put(text, "table", "\n".join(table(read(name)) for name in ("documents", "lengths", "instructions")))
    further = read("further")["environments"] + read("further-held")["environments"]
    text = put(text, "further", in_columns(further, FORMS, "mean LDS / task rho"))
    text = put(text, "ekfac", in_columns(read("ekfac")["environments"], EKFAC, "mean LDS / task rho"))
    text = put(text, "width", widths(read("width")))
    text = put(text, "with_runs", runs_table(read("with_runs")["environments"]))
    by_start = read("starts")["environments"]
    for name, some in (("adapter", by_start[:1]), ("starts", by_start[1:])):
        text = put(text, name, in_columns(some, STARTS, "gradients of"))
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
