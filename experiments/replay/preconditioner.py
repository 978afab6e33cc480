"""Gradients at one state, preconditioned by the Gauss-Newton matrix, against replays of whole trainings.

    python -m experiments.replay.preconditioner small-48 small-192 --data ../shared/data --work WORK \\
        --out experiments/replay/preconditioner.json

An influence function scores a row by ``<g_i, (G + damping I)^-1 g_t>``: g_i is the gradient of the row's loss, g_t that
of the target's loss, and G the Gauss-Newton matrix of the training loss, over a sample of rows. G is never formed:
Lanczos iterations started at g_t give ``V T V^T``, close to G in the directions that matter, and so the solutions for
all dampings at the price of one. After k iterations these are the iterates of k steps of conjugate gradients. Scores
are computed at the initial weights, and at the middle of one training (order 0).

A damping is a fraction of the largest eigenvalue of T. Killed, the same command goes on: scores are stored by state and
target in WORK/replay.

Shape letters: N rows, T targets, K Lanczos iterations, D dampings, P parameters.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.finetune.further import forms
from experiments.replay.run import DEFAULT, Comparison, default_scores, further_artifact, parse_options
from experiments.replay.setting import World
from experiments.worlds.artifacts import FORWARD, relevance, shares
from experiments.worlds.run import FOLDER
from experiments.worlds.setting import Name
from grasp.arrays import F64
from grasp.files import write_atomically
from grasp.runs.retrained import RetrainedRuns
from grasp.training.adamw import AdamWTraining
from grasp.training.hessian_products import RELATIVE_STEP, displaced_weights
from grasp.training.metagradient import BATCH_TOKENS, examples_of, utility_gradient
from grasp.training.replayed_rows import standardize_scores
from grasp.training.row_derivatives import row_derivatives
from grasp.training.row_order import TokenBatch
from grasp.training.trajectory import Trajectory

SAMPLE_STEPS = 48  # batches of the Gauss-Newton matrix
ITERATIONS = 16
GRADIENTS = 5 / 3  # cost of a product with the matrix of a batch, in gradients of the batch
DAMPINGS = (1.0, 0.1, 0.01, 0.001)  # fractions of the largest eigenvalue
STATES = ("initial", "middle")


def batch_product(training: AdamWTraining, batch: TokenBatch, direction: list[Tensor]) -> list[Tensor]:
    """Return J^T B J u for u the direction: J the Jacobian of the logits, B the Hessian of the loss by the logits.

    J u is a central difference of the logits.
    """
    slope_PV: Tensor | float = 0.0  # J u
    for step in displaced_weights(training, direction, (RELATIVE_STEP, -RELATIVE_STEP)):
        with torch.no_grad():
            slope_PV = slope_PV + training.label_logits(batch.ids_BL, batch.weight_BL)[0] / (2.0 * step)
    if isinstance(slope_PV, Tensor):  # otherwise u is 0
        with torch.enable_grad():
            logits_PV, labels = training.label_logits(batch.ids_BL, batch.weight_BL)
            # B is w (diag(p) - p p^T) at each position
            p_PV = torch.softmax(logits_PV.detach(), dim=-1)
            weighted_PV = p_PV * slope_PV
            hessian_PV = weighted_PV - p_PV * weighted_PV.sum(dim=-1, keepdim=True)
            torch.autograd.backward(logits_PV, hessian_PV * labels.weight_P[:, None].to(hessian_PV.dtype))
    product = [gradient.clone() for gradient in training.gradients()]
    training.zero_gradients()
    return product


def gauss_newton_product(training: AdamWTraining, batches: Sequence[TokenBatch], vector: Tensor) -> Tensor:
    """Multiply the Gauss-Newton matrix, a mean over batches, with a vector, (P,)."""
    direction = split(vector, training)
    total = torch.zeros_like(vector)
    for batch in batches:
        total += flat(batch_product(training, batch, direction)) / len(batches)
    return total


def lanczos(training: AdamWTraining, batches: Sequence[TokenBatch], start: Tensor) -> tuple[Tensor, F64]:
    """Return an orthonormal basis of the Krylov space of the matrix and the start, (K, P), and T, (K, K).

    Every new vector is made orthogonal to all others, twice: in float32 the short recurrence loses this.
    """
    basis_KP = torch.empty((ITERATIONS, len(start)), dtype=torch.float64)
    tridiagonal_KK = np.zeros((ITERATIONS, ITERATIONS))
    vector = start / start.norm()
    for k in range(ITERATIONS):
        basis_KP[k] = vector
        product = gauss_newton_product(training, batches, vector.float()).double()
        tridiagonal_KK[k, k] = float(product @ vector)
        for _ in range(2):
            product -= basis_KP[: k + 1].T @ (basis_KP[: k + 1] @ product)
        length = float(product.norm())
        if k + 1 < ITERATIONS:
            tridiagonal_KK[k, k + 1] = tridiagonal_KK[k + 1, k] = length
        vector = product / length
    return basis_KP, tridiagonal_KK


def solutions(basis_KP: Tensor, tridiagonal_KK: F64, length: float) -> Iterator[Tensor]:
    """Yield ``(G + damping I)^-1 g_t`` for every damping, (P,); the first basis vector is g_t / `length`."""
    largest = float(np.linalg.eigvalsh(tridiagonal_KK)[-1])
    first_K = np.eye(len(tridiagonal_KK))[0] * length
    for damping in DAMPINGS:
        solved_K = np.linalg.solve(tridiagonal_KK + damping * largest * np.eye(len(first_K)), first_K)
        yield torch.from_numpy(solved_K) @ basis_KP


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def split(vector: Tensor, training: AdamWTraining) -> list[Tensor]:
    sizes = [parameter.numel() for parameter in training.parameters]
    parts = zip(vector.split(sizes), training.parameters, strict=True)
    return [part.view_as(parameter).contiguous() for part, parameter in parts]


def scored(world: World, state: str, directory: Path) -> dict[str, F64]:
    """Score every row for every target at a state, without a preconditioner and with one for each damping, (N, T)."""
    training = world.training()
    trajectory = Trajectory(training, world.rows, world.order(0))
    batches = list(trajectory.batches(0, min(SAMPLE_STEPS, len(trajectory.order))))
    if state == "middle":
        trajectory.train()
        middle = len(trajectory.order) // 2
        trajectory.restore(min(trajectory.segment_bounds, key=lambda bound: abs(bound - middle)))
    else:
        trajectory.restore(0)
    rows, score_TDN = examples_of(trajectory), []
    for target in world.targets:
        path = directory / f"{state}-{target.name}.npy"
        if not path.exists():
            _, gradient = utility_gradient(training, target.batches(BATCH_TOKENS))
            start = -flat(gradient).double()  # of the loss, which is minus the utility
            basis_KP, tridiagonal_KK = lanczos(training, batches, start)
            directions = [start, *solutions(basis_KP, tridiagonal_KK, float(start.norm()))]
            value_ND = row_derivatives(
                training,
                rows,
                [split(direction.float(), training) for direction in directions],
                "gradient",
                relative_step=0.0,
                batch_tokens=BATCH_TOKENS,
            )
            directory.mkdir(parents=True, exist_ok=True)
            np.save(path, value_ND.T)
            eigenvalues = np.round(np.linalg.eigvalsh(tridiagonal_KK), 4).tolist()
            print(f"{world.name}, {state}, {target.name}: eigenvalues {eigenvalues}", flush=True)
        score_TDN.append(np.load(path))
    score_DNT = np.stack(score_TDN).transpose(1, 2, 0)
    names = ("no preconditioner", *(f"Gauss-Newton, damping {damping:g}" for damping in DAMPINGS))
    return dict(zip(names, score_DNT, strict=True))


def compare(name: Name, data: Path, work: Path) -> dict[str, Any]:
    """Compare all scores with the runs of a world: alone, and added to the default rule."""
    world = World.open(name, data, work)
    environment = RetrainedRuns.open(FOLDER / name)
    utilities = environment.utilities(seeds=(0,), partial=True)
    default_NT = default_scores(world, work, utilities)
    comparison = Comparison(utilities, shares(environment, world.corpus.store, utilities), default_NT)
    artifact = further_artifact(world, work)
    columns = np.concatenate([artifact.unit_columns(target) for target in dict.fromkeys(utilities.targets)])
    kernel_of = {kernel: relevance(artifact, kernel, columns) for kernel in ("gradient", *FORWARD)}
    methods = forms(kernel_of, np.ones(artifact.n_rows))
    _, gradient_NT = methods["gradient"].predict(np.eye(artifact.n_rows), list(utilities.targets))
    records = {"default": comparison.record(default_NT), "gradient kernel": comparison.record(gradient_NT)}
    for state in STATES:
        # the initial state and the order of its sample do not depend on the number of steps, beyond SAMPLE_STEPS
        directory = work / "replay" / (f"preconditioner-{name}" if state == "middle" else "preconditioner-small")
        for method, score_NT in scored(world, state, directory).items():
            label = f"{state} state, {method}"
            records[label] = comparison.record(score_NT)
            for weight in (1, 4):
                summed_NT = default_NT + weight * standardize_scores(score_NT)
                records[f"default + {weight} of {label}"] = comparison.record(summed_NT)
    steps = world.kind.recipe.steps
    return {
        "environment": name,
        "default": DEFAULT,
        "dampings": DAMPINGS,
        "iterations": ITERATIONS,
        "trainings_per_target": round(GRADIENTS * ITERATIONS * min(SAMPLE_STEPS, steps) / steps, 1),
        "scores": records,
    }


def main() -> None:
    """Score, compare, write."""
    options = parse_options(__doc__.splitlines()[0])
    torch.set_num_threads(1)
    reports = [compare(name, options.data, options.work) for name in options.names]
    write_atomically(options.out, (json.dumps({"environments": reports}, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
