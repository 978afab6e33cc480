r"""A training run in which the rows of each batch get Shapley values of the decrease of validation losses.

Start with `Replay`.

The formulas are those of In-Run Data Shapley (Wang et al. 2025, arXiv 2406.11011). It is not the replay of
`grasp.training`, which differentiates a whole training.

A step with learning rate eta moves the covered parameters by -eta sum_i d_i, where d_i = P (c_i g_i): g_i is the
gradient of row i's mean loss, c_i its share of the batch's labels (so that sum_i c_i g_i is the gradient of the batch's
loss, a mean over labels), and P is 1 for a step of SGD, or Adam's 1 / (sqrt(v) + eps), held fixed within the step.
Momentum and weight decay, which do not depend on the batch, are left out. The training itself always takes steps of
AdamW; `update: sgd` only values the rows as if the step were one of SGD, as published. The
utility of a subset S of the batch is the decrease of the validation loss L in a step on S alone,

    U(S) = L(w) - L(w - eta sum_{i in S} d_i)
         ~ eta <g_val, sum_S d_i> - eta^2 / 2 (sum_S d_i)^T H_val (sum_S d_i)

and the Shapley values of the two terms are

    first order     eta <g_val, d_i>
    second order    eta <g_val, d_i> - eta^2 / 2 d_i^T H_val d,    d = sum_j d_j over the batch

H_val d is computed by central differences of g_val along d. Each value is an inner product of a row's gradient with
matrices that are shared by the whole batch, so no row's gradient is formed.

A block is one parameter of the model, seen as a matrix (X, Y); lists of tensors below have one per block.

Shape letters: B rows of the batch, C columns (validation losses), E units, X rows and Y columns of a block.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from grasp.arrays import F64, I64
from grasp.baselines.gradients.layers import choose_layers
from grasp.baselines.gradients.sums import EachGradient, Matrices, WeightedSums, map_blocks, total_norm
from grasp.errors import ModelError
from grasp.files import temporary_path
from grasp.models.causal_lm import ReferenceModel
from grasp.models.gradient_sums import BlockParameters, InnerProducts, run_over
from grasp.models.gradients import Example, PerExample

DIRECTION_ELEMENTS = 1 << 28  # elements of the row gradients in memory at once: 1 GB of float32
# Step of the difference along d, in units of the norm of the parameters. H d is then within 2e-4 of the exact product
# on small models of four families in float32; longer steps add truncation error, shorter ones rounding error.
RELATIVE_STEP = 1e-4


@dataclass(frozen=True, slots=True)
class BatchReplaySettings:
    """Settings that determine a replay."""

    layers: tuple[str, ...]
    order: Literal[1, 2]  # of the values, see the module docstring
    update: Literal["sgd", "adam"]  # P of the values; steps are those of AdamW
    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.01


class Replay:
    """Model, optimizer and step counter. `advance` values the rows of a batch and trains on it."""

    def __init__(
        self,
        model: ReferenceModel,
        units: Sequence[Example],
        weight_CE: F64 | None,
        settings: BatchReplaySettings,
    ) -> None:
        """Start a replay from `model`. The replay changes its weights: pass a copy.

        Args:
            units: the validation set.
            weight_CE: validation losses as weighted sums of the units' losses. Default: one loss per unit.
        Raises:
            SettingsError, ModelError: the layers are not supported.
        """
        self.engine = PerExample(model, choose_layers(model, settings.layers))
        self.settings = settings
        self.step = 0
        self._units, self._weight_CE = units, weight_CE
        self._parameters = BlockParameters(model.model, self.engine.layers, self.engine.work)
        self._weights = self._parameters.read()
        self._optimizer = torch.optim.AdamW(
            self._weights,
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
        )

    @property
    def n_columns(self) -> int:
        """Number of validation losses, C."""
        return len(self._units) if self._weight_CE is None else len(self._weight_CE)

    def advance(self, rows: Sequence[Example]) -> F64:
        """Value the rows of a batch at the current weights, then train on it. Return values (B, C) in nats.

        Positive: the row lowers the validation loss.
        """
        labels_B = np.array([row.labels for row in rows], dtype=np.float64)
        share_B = labels_B / labels_B.sum()
        if self._weight_CE is None:
            gradient, value_BC = self._value_by_unit(rows, share_B)
        else:
            gradient, value_BC = self._value_by_column(rows, share_B, self._weight_CE)
        for weight, grad in zip(self._weights, gradient, strict=True):
            weight.grad = grad
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._parameters.write(self._weights)
        self.step += 1
        return value_BC

    # ------------------------------------------------------------------------------------------- values

    def _value_by_column(self, rows: Sequence[Example], share_B: F64, weight_CE: F64) -> tuple[list[Tensor], F64]:
        """Value rows for a few validation losses: hold the losses' gradients, stream the rows."""
        sums = WeightedSums(self.engine, share_B[None])
        if self.settings.order == 1 and self.settings.update == "sgd":
            products = InnerProducts(self.engine, self._validation(weight_CE), len(rows))
            run_over(self.engine, rows, [sums, products])
        else:
            run_over(self.engine, rows, [sums])
            products = InnerProducts(self.engine, self._direction(sums.matrices, weight_CE), len(rows))
            run_over(self.engine, rows, [products])
        value_BC = self.settings.learning_rate * share_B[:, None] * products.products
        return [total[0] for total in sums.matrices], value_BC

    def _validation(self, weight_CE: F64) -> list[Tensor]:
        """Return the gradients of the validation losses at the current weights, (C, X, Y) per block."""
        sums = WeightedSums(self.engine, weight_CE)
        run_over(self.engine, self._units, [sums])
        return sums.matrices

    def _direction(self, gradient: Matrices, weight_CE: F64) -> list[Tensor]:
        """Return P (g_val - eta / 2 H_val d), (C, X, Y) per block; its product with c_i g_i is the value of row i."""
        direction = self._validation(weight_CE)
        scale = self._scale(gradient)
        if self.settings.order == 2:
            step_d = _scale_matrices(gradient, scale)
            length = self._difference_length(step_d)
            if length:
                # H d = (g(w + length d) - g(w - length d)) / (2 length)
                self._move(step_d, length)
                forward = self._validation(weight_CE)
                self._move(step_d, -length)
                backward = self._validation(weight_CE)
                self._parameters.write(self._weights)
                factor = self.settings.learning_rate / (4.0 * length)
                direction = map_blocks(
                    lambda gradient_XY, a, b: gradient_XY - factor * (a - b), direction, forward, backward
                )
        return _scale_matrices(direction, scale)

    def _value_by_unit(self, rows: Sequence[Example], share_B: F64) -> tuple[list[Tensor], F64]:
        """Value rows for the loss of each unit: hold the rows' gradients, stream the units."""
        sums = WeightedSums(self.engine, share_B[None])
        run_over(self.engine, rows, [sums])
        scale = self._scale(sums.matrices)
        step_d = _scale_matrices(sums.matrices, scale)
        at_once = max(1, DIRECTION_ELEMENTS // self.engine.layers.size)
        parts = [self._unit_values(rows[i : i + at_once], scale, step_d) for i in range(0, len(rows), at_once)]
        value_BE = self.settings.learning_rate * share_B[:, None] * np.concatenate(parts)
        return [total[0] for total in sums.matrices], value_BE

    def _unit_values(self, rows: Sequence[Example], scale: Matrices | None, step_d: Matrices) -> F64:
        """Return <P g_i, g_e - eta / 2 H_e d> for some rows and all units."""
        each = EachGradient(self.engine, len(rows))
        run_over(self.engine, rows, [each])
        directions = _scale_matrices(each.matrices, scale)
        value_EB = self._unit_products(directions)
        length = self._difference_length(step_d) if self.settings.order == 2 else 0.0
        if length:
            self._move(step_d, length)
            forward_EB = self._unit_products(directions)
            self._move(step_d, -length)
            backward_EB = self._unit_products(directions)
            self._parameters.write(self._weights)
            value_EB = value_EB - self.settings.learning_rate / (4.0 * length) * (forward_EB - backward_EB)
        return value_EB.T

    def _unit_products(self, directions: Matrices) -> F64:
        """Return the inner products of the units' gradients at the current weights with the directions, (E, B)."""
        products = InnerProducts(self.engine, directions, len(self._units))
        run_over(self.engine, self._units, [products])
        return products.products

    # ------------------------------------------------------------------------------------------- step

    def _scale(self, gradient: Matrices) -> list[Tensor] | None:
        """Return P, (X, Y) per block, from Adam's second moment including this batch; None for SGD."""
        if self.settings.update == "sgd":
            return None
        decay = self.settings.betas[1]
        correction = 1.0 - decay ** (self.step + 1)
        scale = []
        for weight, total in zip(self._weights, gradient, strict=True):
            state = self._optimizer.state.get(weight, {})
            second = state["exp_avg_sq"] if state else torch.zeros_like(weight)
            second = decay * second + (1.0 - decay) * total[0].square()
            scale.append(1.0 / ((second / correction).sqrt() + self.settings.epsilon))
        return scale

    def _difference_length(self, step_d: Matrices) -> float:
        """Return the step length along d for the difference; 0 if d is 0."""
        size = total_norm(step_d)
        return RELATIVE_STEP * max(total_norm(self._weights), 1.0) / size if size else 0.0

    def _move(self, step_d: Matrices, length: float) -> None:
        """Set the model's parameters to w + length d; `_weights` keeps w."""
        self._parameters.write(map_blocks(lambda weight, d: weight + length * d[0], self._weights, step_d))

    # ------------------------------------------------------------------------------------------- state

    def save(self, path: Path) -> None:
        """Save weights, moments and step; the file is replaced atomically."""
        tensors = {f"weight.{k}": weight for k, weight in enumerate(self._weights)}
        for k, weight in enumerate(self._weights):
            state = self._optimizer.state[weight]
            tensors |= {f"{moment}.{k}": state[moment] for moment in ("exp_avg", "exp_avg_sq")}
        part = temporary_path(path)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part, {"step": str(self.step)})
        with part.open("rb+") as handle:
            os.fsync(handle.fileno())
        part.replace(path)

    def restore(self, path: Path) -> None:
        """Resume from a saved state."""
        with safe_open(path, framework="pt", device=str(self.engine.model.device)) as file:
            self.step = int(file.metadata()["step"])
            for k, weight in enumerate(self._weights):
                weight.copy_(file.get_tensor(f"weight.{k}"))
                self._optimizer.state[weight] = {
                    "step": torch.tensor(float(self.step)),
                    **{moment: file.get_tensor(f"{moment}.{k}") for moment in ("exp_avg", "exp_avg_sq")},
                }
        self._parameters.write(self._weights)


def _scale_matrices(matrices: Matrices, scale: Matrices | None) -> list[Tensor]:
    """Multiply by P elementwise; None: the identity."""
    return list(matrices) if scale is None else map_blocks(lambda matrix, factor: matrix * factor, matrices, scale)


def check_finite(value_BC: F64, row_index_B: I64, step: int) -> None:
    """Check that all values are finite.

    Raises:
        ModelError: a value is not finite; the message names step and row.
    """
    bad = np.argwhere(~np.isfinite(value_BC))
    if len(bad):
        raise ModelError(
            f"replay: step {step}: value of row {row_index_B[bad[0, 0]]} is {value_BC[tuple(bad[0])]}, expected a "
            "finite number; lower learning_rate, or remove the row"
        )


def count_steps(n_rows: int, batch_rows: int) -> int:
    """Return the number of steps per epoch; the last batch may be short."""
    return math.ceil(n_rows / batch_rows)
