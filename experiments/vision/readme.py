"""The table of README.md from result.json: python -m experiments.vision.readme."""

import json
from pathlib import Path

PAPER = {
    "random": (53.92, 50.9, 63.2, 70.0, 74.5),
    "KNN-Shapley": (73.77, 34.1, 48.7, 64.7, 74.3),
    "influence": (75.59, 45.8, 64.4, 72.2, 76.9),
    "TRAK": (55.38, 29.9, 43.4, 52.8, 65.0),
    "datamodels": (54.34, 47.6, 64.1, 71.4, 74.1),
    "in-run 1": (80.28, 55.6, 68.9, 71.9, 75.5),
    "in-run 2": (80.04, 52.8, 66.4, 73.4, 75.9),
    "GRASP (pooled)": (80.32, 56.1, 69.6, 71.8, 76.1),
}


def lines(results: dict) -> list[str]:
    out = [
        "| method | AUROC | 20% | 40% | 60% | 80% | LDS, 95% | paper: AUROC, 20 / 40 / 60 / 80% |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, figures in results["table"].items():
        if name == "all rows":
            continue
        cells = [f"{100 * f['mean']:.1f} ± {100 * f['half']:.1f}" for f in figures.values()]
        rho = results.get("lds", {}).get(name)
        lds = "-" if rho is None else f"{rho['rho']:.2f} [{rho['low']:.2f}, {rho['high']:.2f}]"
        paper = PAPER.get(name)
        theirs = "-" if paper is None else f"{paper[0]}, {' / '.join(map(str, paper[1:]))}"
        out.append(f"| {name} | {' | '.join(cells)} | {lds} | {theirs} |")
    return out


if __name__ == "__main__":
    print("\n".join(lines(json.loads(Path(__file__).with_name("result.json").read_text()))))
