"""bergson's MAGIC on the trainings that are replayed here: task rho, and its price in trainings.

    pip install --target SITE --no-deps bergson==2.5.1 torchopt optree petname jaxtyping wadler-lindig \\
        simple-parsing docstring-parser natsort ml_dtypes graphviz
    PYTHONPATH=SITE python -m experiments.replay.magic small-48 small-192 --data ../shared/data --work WORK \\
        --out experiments/replay/magic.json

MAGIC differentiates one training for one query at a time, exactly, and scores the rows of its batches. It gets the
rows, their order, the recipe and the questions of `experiments.replay.run`, order 0, and our constant inside AdamW's
square root; in `small-48` also its own, which is worse. A query is a target: the mean loss of its answers.

Shape letters: N rows, B rows of a batch or subsets, L tokens, T targets.
"""

import copy
import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchopt
from bergson.magic.data_stream import DataStream
from bergson.magic.trainer import BackwardState, Trainer
from bergson.utils.math import weighted_causal_lm_ce
from datasets import Dataset
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torchopt.pytree import tree_iter

from experiments.replay.run import PROBES, Comparison, added, default_scores, drawn, parse_options
from experiments.replay.setting import World
from experiments.worlds.artifacts import shares
from experiments.worlds.run import FOLDER
from grasp.arrays import F64
from grasp.files import write_atomically
from grasp.runs.retrained import RetrainedRuns
from grasp.training.adjoint import norm_of
from grasp.training.metagradient import BATCH_TOKENS, ROOT_SHARE, Metagradient, TargetBatches
from grasp.training.trajectory import Trajectory

THEIR_ROOT = 1e-17  # bergson's default `eps_root`
WITH_THEIR_ROOT = ("small-48",)


def our_root(world: World) -> float:
    """Return the constant inside AdamW's square root that a replay takes."""
    trajectory = Trajectory(world.training(), world.rows, world.order(0))
    training = trajectory.training
    for batch in trajectory.batches(0, 1):
        training.backward(batch.ids_BL, batch.weight_BL)
    gradients = training.gradients()
    norm, limit = norm_of(gradients), trajectory.training.recipe.clip_norm
    clipped = norm if limit is None else min(norm, limit)
    return ROOT_SHARE * clipped**2 / sum(gradient.numel() for gradient in gradients)


def query_gradient(model: Any, params: dict[str, Tensor], batches: TargetBatches) -> dict[str, Tensor]:
    """Return the gradient of the mean loss of a target's answers."""
    assert batches.answers.are_units
    total: dict[str, Tensor] = {}
    for _, ids_BL, weight_BL in batches.batches:
        ids = torch.from_numpy(ids_BL)
        logits = model(input_ids=ids).logits[:, :-1]
        loss_BL = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)
        weight = torch.from_numpy(weight_BL[:, :-1]).float() / len(batches.answers.weight_E)
        gradients = torch.autograd.grad((weight * loss_BL).sum(), list(params.values()))
        for name, gradient in zip(params, gradients, strict=True):
            total[name] = total[name] + gradient if name in total else gradient
    return total


def magic_scores(world: World, eps_root: float, folder: Path) -> tuple[F64, dict[str, float]]:
    """Train, and differentiate for every target: the utility by the weight of each row of a batch, (N, T).

    Rows that were not drawn are NaN.
    """
    recipe, order = world.kind.recipe, world.order(0)
    model: Any = copy.deepcopy(world.model)  # the trainer moves its parameters to the meta device
    model.requires_grad_(True)
    model.loss_function = partial(weighted_causal_lm_ce, reduction="mean")  # as bergson's own set-up does
    index_S = np.concatenate(order)
    rows = world.corpus.rows
    data = Dataset.from_dict({"input_ids": [rows[int(i)].tolist() for i in index_S]})
    stream = DataStream(data, recipe.batch_rows)
    optimizer = torchopt.adamw(
        lambda step: recipe.learning_rate_at(int(step)),
        betas=(0.9, 0.999),
        eps=1e-8,
        eps_root=eps_root,
        weight_decay=0.0,
    )
    trainer, state = Trainer.initialize(model, optimizer)
    used = time.process_time()
    state = trainer.train(state, stream, inplace=True, save_dir=str(folder), max_grad_norm=1.0)
    trained = time.process_time() - used
    final = state.to("cpu").detach_()
    n_rows = world.rows.n_rows
    score_NT = np.full((n_rows, len(world.targets)), np.nan)
    for t, target in enumerate(world.targets):
        state.detach_()
        state.copy_(final.to("cpu"))
        with state.activate(model) as params:
            gradients = query_gradient(model, params, target.batches(BATCH_TOKENS))
        state.detach_()
        stream.requires_grad = True
        zeros = [
            torch.zeros_like(x) for x in tree_iter(state.opt_state) if torch.is_tensor(x) and x.is_floating_point()
        ]
        backward = BackwardState(gradients, zeros, torch.zeros_like(stream.weights))
        backward = trainer.backward(
            str(folder), stream, backward, state, cleanup=False, inplace=True, max_grad_norm=1.0
        )
        score_NT[:, t] = 0.0
        np.add.at(score_NT[:, t], index_S, -backward.weight_grads.detach().double().numpy())
        print(world.name, target.name, f"{time.process_time() - used:.0f} s of CPU, training {trained:.0f}", flush=True)
    score_NT[np.setdiff1d(np.arange(n_rows), index_S)] = np.nan
    spent = time.process_time() - used
    return score_NT, {
        "cpu_seconds_of_training": round(trained, 1),
        "cpu_seconds": round(spent, 1),
        "trainings": round(spent / trained, 2),
    }


def report(world: World, work: Path) -> dict[str, Any]:
    """Compare MAGIC's scores with retraining, and with the drawn rows of our replay of the same order."""
    environment = RetrainedRuns.open(FOLDER / world.name)
    utilities = environment.utilities(seeds=(0,), partial=True)
    share_BN = shares(environment, world.corpus.store, utilities)
    default_NT = default_scores(world, work, utilities)
    comparison = Comparison(utilities, share_BN, default_NT)
    replayed = Metagradient.load(work / "replay" / f"{world.name}-{PROBES}-probes-0" / "metagradient.safetensors")
    ours_NT = drawn([replayed], len(default_NT))
    result: dict[str, Any] = {"ours": {"scores": comparison.record(ours_NT)}}
    roots = {"our root": our_root(world)}
    if world.name in WITH_THEIR_ROOT:
        roots["its own root"] = THEIR_ROOT
    for label, root in roots.items():
        with tempfile.TemporaryDirectory(dir=work) as folder:
            score_NT, cost = magic_scores(world, root, Path(folder))
        has_N = np.isfinite(score_NT).all(axis=1) & np.isfinite(ours_NT).all(axis=1)
        pairs = zip(score_NT[has_N].T, ours_NT[has_N].T, strict=True)
        same = [round(float(spearmanr(first, second).statistic), 3) for first, second in pairs]
        result[label] = {
            "eps_root": root,
            "scores": comparison.record(score_NT),
            "with the default rule": comparison.record(added(score_NT, default_NT)),
            "rank_correlation_with_ours": same,
            "cost": cost,
        }
        print(world.name, label, json.dumps(result[label]), flush=True)
    return result


def main() -> None:
    """Parse, compare, write."""
    options = parse_options(__doc__.splitlines()[0])
    torch.set_num_threads(1)
    result = {}
    for name in options.names:
        result[name] = report(World.open(name, options.data, options.work), options.work)
        write_atomically(options.out, (json.dumps(result, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
