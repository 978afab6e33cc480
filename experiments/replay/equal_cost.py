"""What else the price of a replay buys: as many retrained subsets, and the predictor that learns from them.

    python -m experiments.replay.equal_cost small-192=9 small-48=18 --data ../shared/data --work WORK \\
        --out experiments/replay/equal_cost.json

NAME=K: K subsets drawn at random are known; the others are ranked by the default rule, by the default rule with the
replay, and by the predictor of `grasp predict --runs`, from the known subsets and the default rule. WORK has the
replays of `experiments.replay.run`. Values are task rho, mean over draws; intervals are 95 %, over draws.

Shape letters: B subsets, N rows, T targets, G labels.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

from experiments.replay.run import default_scores, predicted, shipped_replay
from experiments.replay.setting import World
from experiments.worlds.artifacts import shares
from experiments.worlds.run import FOLDER
from experiments.worlds.setting import NAMES
from grasp.arrays import F64
from grasp.files import write_atomically
from grasp.kernel_table import REPLAY_WEIGHT
from grasp.runs.gaussian_process import GaussianProcess
from grasp.runs.retrained import RetrainedRuns
from grasp.runs.subset_features import SubsetFeatures
from grasp.seeds import stream

DRAWS = 32


def task_rho(predicted_BT: F64, realized_BT: F64) -> float:
    """Return the rank correlation, mean over targets."""
    pairs = zip(predicted_BT.T, realized_BT.T, strict=True)
    return float(np.mean([spearmanr(first, second).statistic for first, second in pairs]))


def compare(name: Any, known: int, data: Path, work: Path) -> dict[str, Any]:
    """Rank the subsets that are not known, in every draw."""
    world = World.open(name, data, work)
    environment = RetrainedRuns.open(FOLDER / name)
    utilities = environment.utilities(seeds=(0,), partial=True)
    share_BN = shares(environment, world.corpus.store, utilities)
    default_NT = default_scores(world, work, utilities)
    with_replay_NT = default_NT + REPLAY_WEIGHT * shipped_replay(name, work)
    targets = np.array(utilities.targets)
    values_BE = utilities.values_BSE.mean(axis=1)
    realized_BT = np.stack([values_BE[:, targets == each].mean(axis=1) for each in dict.fromkeys(targets)], axis=1)
    group_N = np.asarray(world.corpus.label.codes_N)
    share_BG = share_BN @ (group_N[:, None] == np.unique(group_N))
    relevance_BT = predicted(default_NT, share_BN)
    by_share = SubsetFeatures.from_shares(share_BG, realized_BT.shape[1])
    features = replace(by_share, relevance_BT=relevance_BT)
    rho: dict[str, list[float]] = {}
    for draw in range(DRAWS):
        order = stream(0, "equal cost", name, draw).permutation(len(share_BN))
        runs, rest = order[:known], order[known:]
        predicted_by = {}
        for label, parts in (("runs alone", by_share), ("runs and the default rule", features)):
            process = GaussianProcess.fit(parts.take(runs), realized_BT[runs, None])
            predicted_by[label] = process.predict(parts.take(rest))[0]
        predicted_by |= {
            "default": relevance_BT[rest],
            "default and replay": predicted(with_replay_NT, share_BN)[rest],
        }
        for label, predicted_BT in predicted_by.items():
            rho.setdefault(label, []).append(task_rho(predicted_BT, realized_BT[rest]))
    gain = np.array(rho["default and replay"]) - np.array(rho["runs and the default rule"])
    return {
        "subsets": len(share_BN),
        "known": known,
        "draws": DRAWS,
        "task_rho": {label: mean_and_interval(values) for label, values in rho.items()},
        "replay_less_runs": mean_and_interval(gain),
    }


def mean_and_interval(values: Any) -> list[float]:
    """Return the mean and a 95 % interval of it."""
    array = np.asarray(values)
    half_width = 1.96 * array.std(ddof=1) / np.sqrt(len(array))
    return [round(float(array.mean() + sign * half_width), 3) for sign in (0, -1, 1)]


def main() -> None:
    """Parse, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("worlds", nargs="+", help="NAME=K")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {}
    for world in options.worlds:
        name, _, known = world.partition("=")
        if name not in NAMES:
            parser.error(f"{name}: expected one of {', '.join(NAMES)}")
        result[name] = compare(name, int(known), options.data, options.work)
        print(name, json.dumps(result[name]), flush=True)
        write_atomically(options.out, (json.dumps(result, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
