"""Derivatives of final utilities with respect to the weights of rows, by replaying a training run backward.

For a *drawn* row, i.e. one in the batch of a step, this is ``dU/dw_i`` with w_i the weight of its loss in this step. At
*probe steps*, all rows have a derivative: with respect to the weight that the row would have if it were added to the
batch. See `adjoint` for the mathematics, and Engstrom et al. 2025, arXiv 2503.13751, for the idea. Start with
`metagradient`.

Shape letters: K steps, B rows of a batch, L tokens, N rows, T targets, M probe steps.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from safetensors.numpy import load_file, save_file
from torch import Tensor

from grasp.arrays import F64, I64, ratio
from grasp.errors import ModelError
from grasp.models.causal_lm import batches as length_batches
from grasp.models.gradients import Example, UnsupportedLayerError
from grasp.settings import Settings
from grasp.store.directory import Schema, Store
from grasp.store.records import Mark
from grasp.targets.margins import Answers
from grasp.targets.units import UnitTokens
from grasp.training.adamw import AdamWTraining
from grasp.training.adjoint import Adjoint, add_curvature, norm_of, through_update
from grasp.training.hessian_products import RELATIVE_STEP, hessian_product
from grasp.training.row_derivatives import cheaper_method, padded_labels, row_derivatives
from grasp.training.trajectory import Step, TensorSets, Trajectory

BACKWARD = Schema(
    mark=Mark,
    marks="states/*.json",
    plan="metagradient.json",
    other_files=("states",),
    recovery_hint="remove it and replay again",
    error_type=ModelError,
)
ROOT_SHARE = 0.01  # see `MetagradientSettings.root_share`
BATCH_TOKENS = 8192


class MetagradientSettings(Settings):
    """Settings of the differentiation of a training run."""

    relative_step: float = Field(RELATIVE_STEP, gt=0, description="Finite-difference step, in norms of the weights.")
    root_share: float = Field(
        ROOT_SHARE,
        ge=0,
        description="Constant inside AdamW's square root, as a share of the first mean squared clipped gradient.",
    )
    first_step: Annotated[int, Field(ge=0)] = Field(0, description="First step that is replayed.")
    probe_steps: tuple[int, ...] = Field((), description="Steps at which all rows are differentiated.")
    batch_tokens: int = Field(BATCH_TOKENS, gt=0, description="Tokens per forward pass of units and probed rows.")


@dataclass(frozen=True, slots=True)
class Metagradient:
    """Derivatives of T utilities with respect to the weights of rows, nats per unit of weight.

    Entries of steps that were not replayed are NaN.

    Attributes:
        order_KB: rows of each step, padded with -1.
        drawn_KBT: derivative with respect to the weight of each row in the batch of a step.
        probe_steps_M: the probe steps.
        probe_MNT: derivative with respect to the weight that each row would have in the batch of a probe step.
        utility_T: utilities at the end of training.
        adjoint_norm_KT: norm of the derivative with respect to the weights before each step.
    """

    order_KB: I64
    drawn_KBT: F64
    probe_steps_M: I64
    probe_MNT: F64
    utility_T: F64
    adjoint_norm_KT: F64

    def drawn(self, n_rows: int, first: int = 0, last: int | None = None) -> F64:
        """Sum the derivatives of drawn rows over the steps in [`first`, `last`), (N, T); rows never drawn have 0."""
        total_NT = np.zeros((n_rows, self.drawn_KBT.shape[2]))
        is_used_KB = (self.order_KB >= 0) & np.isfinite(self.drawn_KBT[..., 0])
        is_used_KB[:first] = False
        is_used_KB[len(is_used_KB) if last is None else last :] = False
        np.add.at(total_NT, self.order_KB[is_used_KB], self.drawn_KBT[is_used_KB])
        return total_NT

    def probed(self, steps: Sequence[int] | None = None) -> F64:
        """Average the derivatives of all rows over probe steps, each standardized over rows, (N, T)."""
        is_used_M = np.isin(self.probe_steps_M, self.probe_steps_M if steps is None else steps)
        value_MNT = self.probe_MNT[is_used_M & np.isfinite(self.probe_MNT).all(axis=(1, 2))]
        std_M1T = value_MNT.std(axis=1, keepdims=True)
        centred_MNT = value_MNT - value_MNT.mean(axis=1, keepdims=True)
        return np.asarray(ratio(centred_MNT, std_M1T).mean(axis=0))

    def save(self, path: Path) -> None:
        """Write all arrays as one safetensors file."""
        save_file({field.name: np.ascontiguousarray(getattr(self, field.name)) for field in fields(self)}, path)

    @classmethod
    def load(cls, path: Path) -> "Metagradient":
        """Read what `save` wrote."""
        return cls(**load_file(path))


def middle_steps(steps: int, count: int) -> tuple[int, ...]:
    """Return the middle steps of `count` equal parts of a training, or all steps if there are fewer."""
    count = min(count, steps)
    return tuple(int((k + 0.5) * steps / count) for k in range(count))


def replay_trainings(order: Sequence[I64], n_rows: int, n_targets: int, settings: MetagradientSettings) -> float:
    """Return the cost of a replay in trainings: the training, its steps again, a gradient per target, and probes.

    Args:
        order: positions of the rows of each step.
        n_rows: rows of the corpus, all of which are differentiated at the probe steps.
        n_targets: number of targets.
        settings: settings of the replay.
    """
    _, gradients_per_row = cheaper_method(n_targets)
    probes = gradients_per_row * len(settings.probe_steps) * n_rows / sum(len(index_B) for index_B in order)
    return 1.0 + (1 + n_targets) * (len(order) - settings.first_step) / len(order) + probes


@dataclass(frozen=True, slots=True)
class Target:
    """A target: units whose mean utility is differentiated."""

    name: str
    units: Sequence[UnitTokens]

    def batches(self, batch_tokens: int) -> "TargetBatches":
        """Return the answers of the units in batches of similar length."""
        answers = Answers.of(self.units)
        lengths = np.array([len(answer.input_ids) for answer in answers.tokens], dtype=np.int64)
        padded_batches = []
        for index_B in length_batches(lengths, batch_tokens):
            batch = [answers.tokens[int(a)] for a in index_B]
            ids_BL, weight_BL = padded_labels(
                [answer.input_ids for answer in batch], [answer.first for answer in batch]
            )
            padded_batches.append((index_B, ids_BL, weight_BL / weight_BL.sum(axis=1, keepdims=True)))
        return TargetBatches(answers, tuple(padded_batches))


@dataclass(frozen=True, slots=True)
class TargetBatches:
    """The answers of a target's units in batches: their indices, token ids, and label weights of their mean losses."""

    answers: Answers
    batches: tuple[tuple[I64, I64, F64], ...]

    def losses(self, training: AdamWTraining) -> F64:
        """Return the mean loss of every answer at the current weights, (A,)."""
        loss_A = np.empty(len(self.answers.tokens))
        for index_B, ids_BL, weight_BL in self.batches:
            loss_A[index_B] = training.row_losses(ids_BL, weight_BL)
        return loss_A


def examples_of(trajectory: Trajectory) -> list[Example]:
    """Return all rows of the corpus with their label masks."""
    rows = trajectory.rows.rows(np.arange(trajectory.rows.n_rows))
    spans = [slice(start, end) for start, end in zip(rows.offsets[:-1], rows.offsets[1:], strict=True)]
    masks = [
        None if rows.loss_mask is None else rows.loss_mask[span] & (np.arange(span.stop - span.start) > 0)
        for span in spans
    ]
    return [Example(rows.flat_ids[span], loss_mask=mask) for span, mask in zip(spans, masks, strict=True)]


def utility_gradient(training: AdamWTraining, target_batches: TargetBatches) -> tuple[float, list[Tensor]]:
    """Return the mean utility of a target in nats, and its gradient, at the current weights.

    The gradient of a margin is the sum of those of its answers with weights that depend on their losses.
    """
    answers, n_units = target_batches.answers, len(target_batches.answers.weight_E)
    loss_A = None if answers.are_units else target_batches.losses(training)
    weight_A = np.ones(len(answers.tokens)) if loss_A is None else answers.weights(loss_A)
    training.zero_gradients()
    loss = sum(
        float(training.backward(ids_BL, weight_BL * weight_A[index_B, None] / n_units).sum())
        for index_B, ids_BL, weight_BL in target_batches.batches
    )
    gradient = [-gradient for gradient in training.gradients()]
    training.zero_gradients()
    return -loss if loss_A is None else float(answers.utilities(loss_A).mean()), gradient


def utilities(training: AdamWTraining, targets: Sequence[Target], batch_tokens: int = BATCH_TOKENS) -> F64:
    """Return the utility of every target at the current weights, (T,), nats."""
    all_batches = [target.batches(batch_tokens) for target in targets]
    return np.array([batches.answers.utilities(batches.losses(training)).mean() for batches in all_batches])


def metagradient(
    trajectory: Trajectory,
    targets: Sequence[Target],
    settings: MetagradientSettings,
    progress: Callable[[int], None] | None = None,
) -> Metagradient:
    """Differentiate final utilities with respect to the weights of rows. All targets share one replay.

    If the trajectory has a directory, the results of each segment are stored there; an interrupted call is resumed with
    bitwise identical results.

    Args:
        trajectory: a finished training run.
        targets: targets whose utilities are differentiated.
        settings: settings of the replay.
        progress: callback that receives the number of steps that are left.

    Raises:
        ModelError: a derivative is not finite.
    """
    return _Replay(trajectory, targets, settings).run(progress)


class _Replay:
    """State of a replay: adjoints of all targets, and the derivatives computed so far."""

    def __init__(self, trajectory: Trajectory, targets: Sequence[Target], settings: MetagradientSettings) -> None:
        steps = len(trajectory.order)
        assert all(settings.first_step <= step < steps for step in settings.probe_steps)
        self.trajectory, self.training, self.settings = trajectory, trajectory.training, settings
        self.targets = [target.batches(settings.batch_tokens) for target in targets]
        self.rows = examples_of(trajectory) if settings.probe_steps else []
        self.segments = [segment for segment in trajectory.segments if segment[1] > settings.first_step]
        store = None
        if trajectory.directory is not None:
            digest = hashlib.blake2b(digest_size=16)
            for target in self.targets:
                for arrays in target.batches:
                    for array in arrays:
                        digest.update(array.tobytes())
                digest.update(target.answers.scale_A.tobytes() + b"|")
            store = Store(trajectory.directory / "backward", BACKWARD)
            identity = {
                "settings": settings.model_dump(mode="json"),
                "targets": digest.hexdigest(),
                "trajectory": trajectory.identity,
            }
            store.begin(identity, replace=True)
        self.progress_sets = TensorSets("before", store)  # adjoints and results before the first step of a segment
        self.adjoints: list[Adjoint] = []
        batch_rows, n_targets = max(len(index_B) for index_B in trajectory.order), len(targets)
        self.results: dict[str, Any] = {
            "drawn": np.full((steps, batch_rows, n_targets), np.nan),
            "probe": np.full((len(settings.probe_steps), trajectory.rows.n_rows, n_targets), np.nan),
            "utility": np.zeros(n_targets),
            "adjoint_norm": np.full((steps, n_targets), np.nan),
            "root": np.zeros(1),
        }

    def run(self, progress: Callable[[int], None] | None) -> Metagradient:
        """Replay all segments that are not finished, in reverse order."""
        finished = [k for k, (first, _) in enumerate(self.segments) if first in self.progress_sets]
        n_left = finished[0] if finished else len(self.segments)
        if finished:
            self._resume(self.segments[n_left][0])
        else:
            self._begin()
        for first, end in reversed(self.segments[:n_left]):
            for step in self.trajectory.backward_through((first, end)):
                if step.step >= self.settings.first_step:
                    self._differentiate_step(step)
                if progress is not None:
                    progress(step.step)
            if self.trajectory.directory is None:
                continue
            # adjoints and results after this segment replace those after the segment before
            tensors = {f"results.{key}": torch.from_numpy(value) for key, value in self.results.items()}
            for t, adjoint in enumerate(self.adjoints):
                for field in fields(adjoint):
                    for k, tensor in enumerate(getattr(adjoint, field.name)):
                        tensors[f"{t}.{field.name}.{k}"] = tensor
            self.progress_sets.put(first, tensors)
            if end in self.progress_sets:
                self.progress_sets.drop(end)
        results, order = self.results, self.trajectory.order
        order_KB = np.full(results["drawn"].shape[:2], -1, dtype=np.int64)
        for k, index_B in enumerate(order):
            order_KB[k, : len(index_B)] = index_B
        return Metagradient(
            order_KB,
            results["drawn"],
            np.array(self.settings.probe_steps, dtype=np.int64),
            results["probe"],
            results["utility"],
            results["adjoint_norm"],
        )

    def _begin(self) -> None:
        """Differentiate the utilities at the end of training, and determine the root from the first gradient."""
        training, limit = self.training, self.training.recipe.clip_norm
        if self.settings.root_share:  # of the mean squared gradient of the first step after clipping
            self.trajectory.restore(0)
            for batch in self.trajectory.batches(0, 1):
                training.backward(batch.ids_BL, batch.weight_BL)
            norm = norm_of(training.gradients())
            training.zero_gradients()
            clipped = norm if limit is None else min(norm, limit)
            self.results["root"][0] = self.settings.root_share * (clipped**2 / self.trajectory.size.parameters)
        self.trajectory.restore(len(self.trajectory.order))
        for t, target_batches in enumerate(self.targets):
            self.results["utility"][t], gradient = utility_gradient(self.training, target_batches)
            self.adjoints.append(Adjoint.of_weights(gradient))

    def _differentiate_step(self, step: Step) -> None:
        """Backpropagate through one step, for each target."""
        is_probe_step = step.step in self.settings.probe_steps
        directions: list[Sequence[Tensor]] = []
        for t in range(len(self.adjoints)):
            direction = self._back_target(t, step)
            if is_probe_step:
                directions.append(direction)
            del direction  # of a large model, one more direction in memory counts
        if is_probe_step:
            differentiate = partial(
                row_derivatives,
                self.training,
                self.rows,
                directions,
                relative_step=self.settings.relative_step,
                batch_tokens=self.settings.batch_tokens,
            )
            try:
                value_NT = differentiate(cheaper_method(len(directions))[0])
            except UnsupportedLayerError:  # such as experts, whose tensors have no gradient for each row
                value_NT = differentiate("difference")
            self.results["probe"][self.settings.probe_steps.index(step.step)] = value_NT / step.batch.n_labels

    def _back_target(self, t: int, step: Step) -> list[Tensor]:
        """Backpropagate through one step for one target; return the derivative by the gradient of the batch."""
        settings, training, results = self.settings, self.training, self.results
        adjoint, batch, k = self.adjoints[t], step.batch, step.step
        direction = through_update(
            adjoint,
            step.gradient,
            step.first_after,
            step.second_after,
            recipe=training.recipe,
            step=k,
            root=float(results["root"][0]),
        )
        relative_step = settings.relative_step * (-1 if k % 2 else 1)  # errors cancel over steps
        product, along_B = hessian_product(
            training, batch.ids_BL, batch.weight_BL, direction, step.gradient, step.loss_B, relative_step
        )
        add_curvature(adjoint, training.recipe.learning_rate_at(k), training.weight_decays, product)
        weight_B = self.trajectory.weight_N[batch.row_index_B]
        along_B = np.divide(along_B, weight_B, out=np.full_like(along_B, np.nan), where=weight_B != 0)
        results["drawn"][k, : len(along_B), t] = along_B
        results["adjoint_norm"][k, t] = adjoint.norm
        if not math.isfinite(adjoint.norm):
            raise ModelError(
                f"replay: the derivative is {adjoint.norm} at step {k}, expected a finite number; set "
                "first_step to a later step, or lower the learning rate"
            )
        return direction

    # --------------------------------------------------------------------------------------------------------- storage

    def _resume(self, first: int) -> None:
        """Restore adjoints and results before the first step of a segment."""
        tensors = self.progress_sets.get(first)
        self.results = {key: tensors[f"results.{key}"].numpy().copy() for key in self.results}
        count, device = len(self.training.parameters), self.training.device
        for t in range(len(self.targets)):
            derivatives = [
                [tensors[f"{t}.{field.name}.{k}"].to(device, copy=True) for k in range(count)]
                for field in fields(Adjoint)
            ]
            self.adjoints.append(Adjoint(*derivatives))
