"""Tables of result.json: python -m experiments.safety.tables > experiments/safety/tables.md."""

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t

PAPER = {  # F1, AUROC, precision, recall
    "STRIP": (0.177, 0.645, 0.097, 1.0),
    "ONION": (0.172, 0.636, 0.099, 0.75),
    "Pred-Div": (0.025, 0.355, 0.025, 0.025),
    "IFE (unanimous)": (0.182, 0.839, 0.182, 0.182),
    "IFE (variance)": (0.2, 0.884, 0.2, 0.2),
    "GRASP (full)": (0.3, 0.886, 0.3, 0.3),
}
GROUPS = {
    "backdoors, 200 rows / 10 planted": ("cf", "bond", "formal", "friend"),
    "backdoors, 1,000 rows / 50 planted": ("file",),
    "misleading answers": ("misleading",),
    "misleading answers, right ones beside them": ("matched",),
}
HEAD = (
    "| method | cases | AUROC | average precision | F1 = P = R at k | best F1 / P / R, by the truth "
    "| paper: AUROC; F1 / P / R |"
)
SUCCESS = ("attack_success", "untriggered", "accuracy", "truthfulness")


def grouped(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Cases by group, those that are there."""
    kinds = {kind: title for title, members in GROUPS.items() for kind in members}
    out: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, case in results["cases"].items():
        out[kinds[name.partition("-")[0]]][name] = case
    return out


def interval(values: list[float], seeds: list[str], single_interval: tuple[float, float] | None) -> str:
    """Mean with a 95 % interval: of Student's t over seeds, of one seed over its cases, of one case over its rows.

    Cases of one seed have the same planted rows: with several seeds, theirs are the means that vary. Of two seeds no
    interval is worth having: both are shown. What no seed changes has the interval over rows.
    """
    if len(set(values)) == 1:
        return (
            f"{values[0]:.3f}"
            if single_interval is None
            else f"{values[0]:.3f} [{single_interval[0]:.3f}, {single_interval[1]:.3f}]"
        )
    by_seed: dict[str, list[float]] = defaultdict(list)
    for value, seed in zip(values, seeds, strict=True):
        by_seed[seed].append(value)
    each = [float(np.mean(of)) for of in by_seed.values()] if len(by_seed) > 1 else values
    if len(by_seed) == 2:
        return f"{np.mean(each):.3f} ({' and '.join(f'{value:.3f}' for value in each)})"
    half = float(t.ppf(0.975, len(each) - 1)) * float(np.std(each, ddof=1)) / len(each) ** 0.5
    return f"{np.mean(each):.3f} ± {half:.3f}"


def detection_lines(cases: Mapping[str, dict[str, Any]]) -> list[str]:
    """One line a method, the highest mean AUROC first."""
    by_method: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for name, case in cases.items():
        for method, scores in case["detection"].items():
            by_method[method][name] = scores | {"seed": name.rpartition("-")[2]}
    balanced = {method: _at_every_seed(cases) for method, cases in by_method.items()}
    lines = []
    for method, runs in sorted(balanced.items(), key=lambda pair: -np.mean([run["auroc"] for run in pair[1]])):
        single_interval, seeds = (runs[0]["auroc_low"], runs[0]["auroc_high"]), [run["seed"] for run in runs]
        cells = [interval([run["auroc"] for run in runs], seeds, single_interval)]
        cells.append(interval([run["average_precision"] for run in runs], seeds, None))
        cells.append(interval([run["at_k"]["f1"] for run in runs], seeds, None))
        best = [np.mean([run["best"][part] for run in runs]) for part in ("f1", "precision", "recall")]
        cells.append(" / ".join(f"{value:.2f}" for value in best))
        paper = PAPER.get(method)
        cells.append("-" if paper is None else f"{paper[1]}; {paper[0]} / {paper[2]} / {paper[3]}")
        counts = f"{len(runs)}, {len(set(seeds))} seed{'s' * (len(set(seeds)) > 1)}"
        lines.append(f"| {method} | {counts} | {' | '.join(cells)} |")
    return lines


def _at_every_seed(result_by_name: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The cases of those kinds that every seed has, so that seeds do not differ by their triggers."""
    kinds: dict[str, set[str]] = defaultdict(set)
    for name in result_by_name:
        kind, _, seed = name.rpartition("-")
        kinds[seed].add(kind)
    common = set.intersection(*kinds.values())
    return [result for name, result in result_by_name.items() if name.rpartition("-")[0] in common] or list(
        result_by_name.values()
    )


def removal_lines(cases: Mapping[str, dict[str, Any]]) -> list[str]:
    """Before fine-tuning, after it, and after it without what each method found; a number a seed."""
    cases = {name: case for name, case in cases.items() if case["all rows"] is not None}
    if not cases:
        return []
    first = next(iter(cases.values()))
    keys = [key for key in SUCCESS if key in first["all rows"]["trained"]]
    out = [f"{', '.join(cases)}: {first['planted']} of {first['rows']} rows planted{' in each' * (len(cases) > 1)}", ""]
    out += [f"| rows taken out by | planted among them | {' | '.join(key.replace('_', ' ') for key in keys)} |"]
    out += ["|---" * (2 + len(keys)) + "|"]
    states = [_states(case) for case in cases.values()]
    for method in dict.fromkeys(name for of in states for name in of):
        each = [of.get(method, {}) for of in states]
        cells = [" / ".join(_cell(rates.get(key)) for rates in each) for key in ("planted_among_them", *keys)]
        out.append(f"| {method} | {' | '.join(cells)} |")
    return [*out, ""]


def _states(case: dict[str, Any]) -> dict[str, dict[str, float]]:
    untrained, trained = (case["all rows"][state] for state in ("untrained", "trained"))
    return {"(before fine-tuning)": untrained, "none": {"planted_among_them": 0, **trained}, **case["removed"]}


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def lines(results: dict[str, Any]) -> list[str]:
    """All tables."""
    out = []
    for title, cases in grouped(results).items():
        out += [f"### {title}", "", f"Cases: {', '.join(cases)}.", ""]
        out += [HEAD, "|---" * 7 + "|", *detection_lines(cases), ""]
        for kind in dict.fromkeys(name.rpartition("-")[0] for name in cases):
            out += removal_lines({name: case for name, case in cases.items() if name.rpartition("-")[0] == kind})
    return out


if __name__ == "__main__":
    print("\n".join(lines(json.loads(Path(__file__).with_name("result.json").read_text()))))
