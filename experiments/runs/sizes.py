"""From small and short runs to a larger and longer one: planted laws, of which one is not that of the fit.

    python -m experiments.runs.sizes --out experiments/runs/sizes.json

24 mixtures of seven sources at 1 M parameters, 12 of them at 60 M as well, 6 at 300 M with six times as many tokens;
six losses with noise. 16 other mixtures are predicted at 300 M, 1 B and 7 B. *Small*: ranked by their true losses at
1 M, which is the most that small runs alone can tell.
Shape letters: B mixtures, G sources, T losses.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

import grasp
from grasp.arrays import F64
from grasp.files import write_atomically
from grasp.runs.metrics import spearman
from grasp.seeds import stream

SOURCES, LOSSES, SEEDS, NOISE = 7, 6, 12, 0.004
SIZES = ((24, 1e6, 1e9), (12, 6e7, 1e9), (6, 3e8, 6e9))  # runs, parameters, tokens
PREDICTED = ((3e8, 6e9), (1e9, 2e10), (7e9, 3e10))

Law = Callable[[F64, float, float], F64]


def additive(seed: int) -> Law:
    """Diminishing returns of each source, and costs of small and of short runs; sources cost small runs differently."""
    rng = np.random.default_rng(seed)
    worth_GT, cost_GT = rng.gamma(0.7, 1, (SOURCES, LOSSES)), rng.gamma(1.0, 1, (SOURCES, LOSSES))
    exponent_T, limit_T = rng.uniform(0.3, 0.7, LOSSES), rng.uniform(1.5, 2, LOSSES)

    def loss(share_BG: F64, params: float, tokens: float) -> F64:
        returns_BT = ((share_BG[:, :, None] ** exponent_T) * worth_GT).sum(axis=1)
        capacity_BT = 0.5 + share_BG @ cost_GT
        small, short = (params / 1e8) ** -0.3, (tokens / 2e9) ** -0.28
        return limit_T + 0.6 / (0.3 + returns_BT) + 0.27 * capacity_BT * small + 0.45 * short

    return loss


def multiplicative(seed: int) -> Law:
    """The excess of a mixture times a power of the size, which differs between sources: not the law of the fit."""
    rng = np.random.default_rng(seed)
    worth_GT, exponent_GT = rng.gamma(0.7, 1, (SOURCES, LOSSES)), rng.uniform(0.08, 0.2, (SOURCES, LOSSES))
    limit_T = rng.uniform(1.5, 2, LOSSES)

    def loss(share_BG: F64, params: float, tokens: float) -> F64:
        power_BT = share_BG @ exponent_GT
        excess_BT = 1.2 / (0.3 + np.sqrt(share_BG) @ worth_GT)
        return limit_T + excess_BT * np.exp(-power_BT * np.log(params / 1e8)) * (tokens / 2e9) ** -0.1

    return loss


def trial(law: Law, seed: int) -> list[dict[str, float]]:
    """Rank correlation, error and coverage at each predicted size."""
    rng = stream(seed, "runs", "sizes")
    share_BG = rng.dirichlet(np.full(SOURCES, 0.7), 40)
    rows = [(b, params, tokens) for count, params, tokens in SIZES for b in range(count)]
    loss_RT = np.concatenate([law(share_BG[[b]], params, tokens) for b, params, tokens in rows])
    loss_RT += NOISE * rng.standard_normal(loss_RT.shape)
    values = [f"source-{g}" for g in range(SOURCES)]
    of_runs = pa.table({"run": [f"m{b}" for b in range(24)]} | {v: share_BG[:24, g] for g, v in enumerate(values)})
    columns = zip(("params", "tokens"), np.array([row[1:] for row in rows]).T, strict=True)
    results = {"run": [f"m{b}" for b, *_ in rows]} | dict(columns)
    results |= {f"task-{t}/loss": loss_RT[:, t] for t in range(LOSSES)}
    runs = grasp.import_runs(of_runs, pa.table(results), label="source")
    held_BG = share_BG[24:]
    names = [f"x{b:02}" for b in range(len(held_BG))]
    mixtures = pa.table({"mixture": names} | {value: held_BG[:, g] for g, value in enumerate(values)})
    lines = []
    for params, tokens in PREDICTED:
        frame = grasp.predict_runs(runs, mixtures, params=params, tokens=tokens).to_pandas()
        expected_BT, low_BT, high_BT = (
            frame.pivot_table(name, "mixture", "metric").to_numpy() for name in ("expected", "low", "high")
        )
        true_BT, small_BT = law(held_BG, params, tokens), law(held_BG, *SIZES[0][1:])
        lines.append(
            {
                "params": params,
                "rho": float(spearman(expected_BT, true_BT).mean()),
                "rho_of_small": float(spearman(small_BT, true_BT).mean()),
                "error_percent": float(100 * np.abs(expected_BT / true_BT - 1).mean()),
                "coverage": float(((low_BT <= true_BT) & (true_BT <= high_BT)).mean()),
            }
        )
    return lines


def main() -> None:
    """Parse, fit, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    summary = {}
    for name, law in (("additive", additive), ("multiplicative", multiplicative)):
        trials = [trial(law(seed), seed) for seed in range(SEEDS)]
        for k, (params, _) in enumerate(PREDICTED):
            columns = {key: np.array([lines[k][key] for lines in trials]) for key in trials[0][k]}
            summary[f"{name}, {params:.0e}"] = {
                key: [round(float(v.mean()), 3), round(float(1.96 * v.std(ddof=1) / len(v) ** 0.5), 3)]
                for key, v in columns.items()
                if key != "params"
            }
            print(name, f"{params:.0e}", summary[f"{name}, {params:.0e}"], flush=True)
    write_atomically(args.out, (json.dumps(summary, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
