"""Tables of result.json: python -m experiments.safety.tables > experiments/safety/tables.md."""

import json
from collections import defaultdict
from collections.abc import Iterable
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


def grouped(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Cases by group, those that are there."""
    kinds = {kind: title for title, members in GROUPS.items() for kind in members}
    out: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, case in found["cases"].items():
        out[kinds[name.partition("-")[0]]][name] = case
    return out


def interval(values: list[float], alone: tuple[float, float] | None) -> str:
    """Mean with a 95 % interval: of Student's t over cases, or of one case's own rows."""
    mean = float(np.mean(values))
    if len(values) == 1:
        return f"{mean:.3f}" if alone is None else f"{mean:.3f} [{alone[0]:.3f}, {alone[1]:.3f}]"
    half = float(t.ppf(0.975, len(values) - 1)) * float(np.std(values, ddof=1)) / len(values) ** 0.5
    return f"{mean:.3f} ± {half:.3f}"


def detection_lines(cases: Iterable[dict[str, Any]]) -> list[str]:
    """One line a method, the highest mean AUROC first."""
    by_method: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for case in cases:
        for method, one in case["detection"].items():
            by_method[method].append(one)
    lines = []
    for method, found in sorted(by_method.items(), key=lambda pair: -np.mean([one["auroc"] for one in pair[1]])):
        alone = (found[0]["auroc_low"], found[0]["auroc_high"])
        cells = [interval([one["auroc"] for one in found], alone)]
        cells.append(interval([one["average_precision"] for one in found], None))
        cells.append(interval([one["at_k"]["f1"] for one in found], None))
        best = [np.mean([one["best"][part] for one in found]) for part in ("f1", "precision", "recall")]
        cells.append(" / ".join(f"{value:.2f}" for value in best))
        paper = PAPER.get(method)
        cells.append("-" if paper is None else f"{paper[1]}; {paper[0]} / {paper[2]} / {paper[3]}")
        lines.append(f"| {method} | {len(found)} | {' | '.join(cells)} |")
    return lines


def removal_lines(name: str, case: dict[str, Any]) -> list[str]:
    """Before fine-tuning, after it, and after it without what each method found."""
    if case["all rows"] is None:
        return []
    there = [key for key in SUCCESS if key in case["all rows"]["trained"]]
    out = [f"{name}: {case['planted']} of {case['rows']} rows planted", ""]
    out += [f"| rows taken out by | planted among them | {' | '.join(key.replace('_', ' ') for key in there)} |"]
    out += ["|---" * (2 + len(there)) + "|"]
    states = {"(before fine-tuning)": (None, case["all rows"]["untrained"])}
    states["none"] = (0, case["all rows"]["trained"])
    states |= {method: (one["planted_among_them"], one) for method, one in case["removed"].items()}
    for method, (caught, one) in states.items():
        cells = [f"{one[key]:.2f}" for key in there]
        out.append(f"| {method} | {'-' if caught is None else caught} | {' | '.join(cells)} |")
    return [*out, ""]


def lines(found: dict[str, Any]) -> list[str]:
    """All tables."""
    out = []
    for title, cases in grouped(found).items():
        out += [f"### {title}", "", f"Cases: {', '.join(cases)}.", ""]
        out += [HEAD, "|---" * 7 + "|", *detection_lines(cases.values()), ""]
        for name, case in cases.items():
            out += removal_lines(name, case)
    return out


if __name__ == "__main__":
    print("\n".join(lines(json.loads(Path(__file__).with_name("result.json").read_text()))))
