"""Rows selected with and without a replay: a model is trained on each selection, and its loss on questions is compared.

    python -m experiments.replay.decision small-48 small-192 --data ../shared/data --work WORK \\
        --out experiments/replay/decision.json

The small model of `experiments.worlds` is trained by the recipe of a world on a tenth or three tenths of its 3,000
documents. These have the highest sums of standardized scores over four targets; `random` is another draw for each seed.
Scores use 64 questions of a target. The loss is measured on these, and on 128 others of the same targets. WORK has the
replays of `experiments.replay.run`; interrupted, the same command continues.

Shape letters: N rows, T targets, E questions, S seeds.
"""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.finetune.methods import method_scores
from experiments.replay.run import default_scores, further_artifact, parse_options, shipped_replay
from experiments.replay.setting import World
from experiments.worlds.run import FOLDER
from experiments.worlds.setting import LENGTH, target_settings
from grasp.arrays import F64, I64
from grasp.files import write_atomically
from grasp.kernel_table import REPLAY_WEIGHT
from grasp.runs.retrained import RetrainedRuns
from grasp.seeds import stream
from grasp.targets import load_units
from grasp.training.metagradient import Target
from grasp.training.replayed_rows import standardize_scores
from grasp.training.trajectory import Trajectory

SHARES = (0.1, 0.3)
SEEDS = (0, 1, 2)
KNOWN, OTHER = 64, 128  # questions of a target
RESAMPLES = 2000
DEFAULT, WITH_REPLAY, REPLAY = "default", "default and replay", "replay"


def scores_of(world: World, work: Path) -> dict[str, F64]:
    """Score every row for every target by each method, (N, T)."""
    utilities = RetrainedRuns.open(FOLDER / world.name).utilities(seeds=(0,), partial=True)
    default_NT = default_scores(world, work, utilities)
    replay_NT = shipped_replay(world.name, work)
    artifact = further_artifact(world, work)
    bm25_NE = method_scores(artifact, "bm25")
    columns = [artifact.unit_columns(target.name) for target in world.targets]
    return {
        DEFAULT: default_NT,
        WITH_REPLAY: default_NT + REPLAY_WEIGHT * replay_NT,
        REPLAY: replay_NT,
        "bm25": np.stack([bm25_NE[:, index].mean(axis=1) for index in columns], axis=1),
    }


def questions_of(world: World, work: Path) -> list[Target]:
    """Return the known and the other questions of every target, in this order."""
    settings = target_settings(world.name, work).model_copy(update={"units_per_target": KNOWN + OTHER})
    units = load_units(settings)
    tokens = units.tokenize(world.tokenizer, LENGTH)
    names = np.array([unit.target for unit in units.units])
    return [Target(name, [tokens[e] for e in np.flatnonzero(names == name)]) for name in dict.fromkeys(names.tolist())]


def train_on(world: World, row_index: I64, seed: int, questions: list[Target]) -> list[list[float]]:
    """Train on some rows in an order of the seed, and return the loss on every question of each target."""
    order = row_index[stream(seed, "replay", "decision", "order").permutation(len(row_index))]
    batches = [np.array(batch, dtype=np.int64) for batch in world.kind.recipe.batches(order.tolist())]
    trajectory = Trajectory(world.training(), world.rows, batches)
    trajectory.retrain(trajectory.weight_N)
    losses = []
    for target in questions:
        of_target = target.batches(8192)
        utility_E = of_target.answers.utilities(of_target.losses(trajectory.training))
        losses.append([round(-float(value), 5) for value in utility_E])
    return losses


def selected(method: str, share: float, seed: int, scores: dict[str, F64], n_rows: int) -> I64:
    """Return the rows of a selection."""
    count = round(share * n_rows)
    if method == "random":
        return np.sort(stream(seed, "replay", "decision", "random").permutation(n_rows)[:count])
    total_N = standardize_scores(scores[method]).sum(axis=1)
    return np.sort(np.argsort(-total_N, kind="stable")[:count])


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Loss of each method on known and other questions, and that of the default rule less it, with 95 % intervals."""
    out = []
    for world, share in dict.fromkeys((run["world"], run["share"]) for run in runs):
        loss_of = {
            (run["method"], run["seed"]): np.array(run["loss"])
            for run in runs
            if (run["world"], run["share"]) == (world, share)
        }
        for method in dict.fromkeys(name for name, _ in loss_of):
            if any((name, seed) not in loss_of for name in (method, "random", DEFAULT) for seed in SEEDS):
                continue
            line: dict[str, Any] = {"world": world, "share": share, "method": method}
            for part, index in (("known", slice(KNOWN)), ("other", slice(KNOWN, None))):
                values = {
                    name: np.stack([loss_of[name, seed][:, index] for seed in SEEDS])
                    for name in (method, "random", DEFAULT)
                }
                line[part] = round(float(values[method].mean()), 4)
                line[f"{part}_below_random"] = difference(values["random"] - values[method])
                line[f"{part}_below_default"] = difference(values[DEFAULT] - values[method])
            out.append(line)
    return out


def difference(value_STE: Any) -> list[float]:
    """Return the mean with a 95 % interval over seeds and, within targets, questions."""
    generator = stream(0, "replay", "decision", "resamples")
    seeds, targets, questions = value_STE.shape
    means = []
    for _ in range(RESAMPLES):
        drawn_STE = value_STE[generator.integers(seeds, size=seeds)]
        means.append(np.mean([drawn_STE[:, t, generator.integers(questions, size=questions)] for t in range(targets)]))
    return [round(float(value), 4) for value in (value_STE.mean(), *np.percentile(means, [2.5, 97.5]))]


def main() -> None:
    """Select, train, measure, write."""
    options = parse_options(__doc__.splitlines()[0])
    torch.set_num_threads(1)
    runs: list[dict[str, Any]] = json.loads(options.out.read_text())["runs"] if options.out.exists() else []
    for name in options.names:
        world = World.open(name, options.data, options.work)
        scores, questions = scores_of(world, options.work), questions_of(world, options.work)
        for share in SHARES:
            for seed in SEEDS:
                for method in ("random", *scores):
                    key = {"world": name, "share": share, "method": method, "seed": seed}
                    if any(key.items() <= run.items() for run in runs):
                        continue
                    used = time.process_time()
                    chosen = selected(method, share, seed, scores, world.rows.n_rows)
                    runs.append(key | {"loss": train_on(world, chosen, seed, questions)})
                    print(key, f"{np.mean(runs[-1]['loss']):.4f}, {time.process_time() - used:.0f} s", flush=True)
                    content = json.dumps({"summary": summary(runs), "runs": runs})
                    write_atomically(options.out, (content + "\n").encode())


if __name__ == "__main__":
    main()
