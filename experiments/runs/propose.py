"""Does it pay to choose the next run? Runs that were made are handed out one by one, by `propose` or at random.

    python -m experiments.runs.propose --data ../shared/data/regmix --worlds bench-out \\
        --out experiments/runs/propose.json

Begins with 8 runs; four more are taken at a time out of those that are left. Regret is how much worse the run is that
is then thought best than the best of all, over the standard deviation of all; rho is of runs that are never handed out.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from experiments.runs.curves import WORLDS, World, of_environment, of_regmix
from grasp.mixing.proposals import most_informative
from grasp.runs.gaussian_process import GaussianProcess
from grasp.runs.subset_features import SubsetFeatures
from grasp.seeds import stream

FIRST, EACH = 8, 4
UP_TO = 32


def trial(world: World, how: str, at: int) -> list[tuple[int, float, float]]:
    """Runs, regret and rho after each round."""
    rng = stream(0, "propose", world.name, at)
    n_runs = len(world.features)
    order = rng.permutation(n_runs)
    pool, held = order, None
    if world.held is None:
        pool, held = order[: n_runs * 3 // 4], order[n_runs * 3 // 4 :]
    objective_RS1 = world.utility_RST.mean(axis=2, keepdims=True)
    utility_RST = np.concatenate([world.utility_RST, objective_RS1], axis=2)
    features = with_aim(world.features)
    held_out = with_aim(world.held) if world.held is not None else features.take(held)
    truth_R = world.held_RT.mean(axis=1) if world.held_RT is not None else objective_RS1[held].mean(axis=(1, 2))
    objective_R = objective_RS1.mean(axis=(1, 2))[pool]
    picked_runs = list(range(FIRST))
    values = []
    while True:
        process = GaussianProcess.fit(features.take(pool[picked_runs]), utility_RST[pool[picked_runs]])
        guess_R = process.predict(features.take(pool))[0][:, -1]
        regret = float((objective_R.max() - objective_R[int(np.argmax(guess_R))]) / objective_R.std())
        values.append(
            (len(picked_runs), regret, float(spearmanr(process.predict(held_out)[0][:, -1], truth_R).statistic))
        )
        if len(picked_runs) >= UP_TO:
            return values
        left = [k for k in range(len(pool)) if k not in picked_runs]
        if how == "random":
            picked_runs += left[:EACH]  # the pool is in random order
        else:
            picked, _ = most_informative(process, features.take(pool[left]), EACH, how, rng)
            picked_runs += [left[k] for k in picked]


def with_aim(features: SubsetFeatures) -> SubsetFeatures:
    """One task more: the mean of all."""
    relevance, kernel, within_group = (
        np.concatenate([feature, feature.mean(axis=1, keepdims=True)], axis=1)
        for feature in (features.relevance_BT, features.kernel_BTM, features.within_slice_BT)
    )
    return SubsetFeatures(features.share_BG, relevance, kernel, features.sketch_BD, within_group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--worlds", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--only", default="", help="worlds whose name begins so; the others stay as they are in --out")
    args = parser.parse_args()
    makers: dict[str, Callable[[], World]] = {"regmix 1M": lambda: of_regmix(args.data)}
    for name, art in WORLDS:
        if not art.endswith("-all"):
            makers[name] = lambda name=name, art=art: of_environment(name, art, args.worlds)
    known = json.loads(args.out.read_text()) if args.out.exists() else []
    lines = {name: [line for line in known if line["world"] == name] for name in makers}
    for name, make in makers.items():
        if name.startswith(args.only):
            lines[name] = simulated(make(), args.trials)
            args.out.write_text(json.dumps([line for name in makers for line in lines[name]], indent=1) + "\n")


def simulated(world: World, trials: int) -> list[dict[str, Any]]:
    """One line a way to choose and a number of runs."""
    lines: list[dict[str, Any]] = []
    for how in ("random", "best", "values") if world.held is not None else ("random", "best"):
        results = np.array([trial(world, how, at) for at in range(trials)])
        for step in results.transpose(1, 0, 2):
            error = 1.96 * step.std(axis=0, ddof=1) / np.sqrt(len(step))
            line = {"world": world.name, "how": how, "runs": int(step[0, 0]), "trials": len(step)}
            for k, name in ((1, "regret"), (2, "rho")):
                line |= {name: round(float(step[:, k].mean()), 4), f"{name}_error": round(float(error[k]), 4)}
            lines.append(line)
            print(json.dumps(line), flush=True)
    return lines


if __name__ == "__main__":
    main()
