r"""One training run gone through again, each step's batch valued as a game of its own.

A step with learning rate eta moves the covered parameters by -eta sum_i d_i, where d_i = P (c_i g_i): g_i is the
gradient of row i's mean loss, c_i its share of the batch's labels (so that sum_i c_i g_i is the gradient of the batch's
loss, a mean over labels), and P is 1 for a step of SGD, or Adam's 1 / (sqrt(v) + eps), held fixed within the step. The
utility of a part S of the batch is what the step would take off the validation loss L with S alone,

    U(S) = L(w) - L(w - eta sum_{i in S} d_i)
         ~ eta <g_val, sum_S d_i> - eta^2 / 2 (sum_S d_i)^T H_val (sum_S d_i)

and the Shapley values of the two terms are

    first order     eta <g_val, d_i>
    second order    eta <g_val, d_i> - eta^2 / 2 d_i^T H_val d,    d = sum_j d_j over the batch

H_val d comes from central differences of g_val along d. Each is an inner product of a row's gradient with matrices that
are the same for the whole batch, so no row's gradient is formed.

Shape letters: B rows of the batch, C columns (validation losses), E units, X left width, Y right width.
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
from grasp.errors import ModelError
from grasp.files import temporary_path
from grasp.models.causal_lm import ReferenceModel
from grasp.models.gradient_sums import (
    BlockParameters,
    EachGradient,
    InnerProducts,
    Matrices,
    WeightedSums,
    combined,
    norm_of,
    run_over,
)
from grasp.models.gradients import Example, PerExample

DIRECTION_ELEMENTS = 1 << 28  # numbers in the gradients of the rows that are held at once: 1 GB of float32
# Length of the difference along d, in units of the norm of the parameters. H d is then within 2e-4 of the exact product
# on small models of four families, in float32, where longer steps bend and shorter ones round.
RELATIVE_STEP = 1e-4


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """What decides a replay."""

    layers: tuple[str, ...]
    order: Literal[1, 2]
    update: Literal["sgd", "adam"]
    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.01


class Replay:
    """Model, optimizer and step counter; every step trains on a batch and values its rows."""

    def __init__(
        self,
        model: ReferenceModel,
        units: Sequence[Example],
        weight_CE: F64 | None,
        settings: ReplaySettings,
    ) -> None:
        """Begin at `model`, whose weights the replay changes: a copy of its own.

        Args:
            units: the validation set.
            weight_CE: validation losses, each a weighted sum of the units' losses; none: each unit's own.
        Raises:
            SettingsError, ModelError: the layers cannot be covered.
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
        return len(self._units) if self._weight_CE is None else len(self._weight_CE)

    def advance(self, rows: Sequence[Example]) -> F64:
        """Train on a batch, after its rows were valued at the weights before: (B, C), nats.

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

    # ------------------------------------------------------------------------------------------- the values

    def _value_by_column(self, rows: Sequence[Example], share_B: F64, weight_CE: F64) -> tuple[list[Tensor], F64]:
        """A few validation losses: their gradients are the matrices, the rows pass by."""
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
        """Gradients of the validation losses at the weights that the model has now, (C, X, Y) a block."""
        sums = WeightedSums(self.engine, weight_CE)
        run_over(self.engine, self._units, [sums])
        return sums.matrices

    def _direction(self, gradient: Matrices, weight_CE: F64) -> list[Tensor]:
        """P (g_val - eta / 2 H_val d)."""
        direction = self._validation(weight_CE)
        scale = self._scale(gradient)
        if self.settings.order == 2:
            moved = _scaled(gradient, scale)
            length = self._difference_length(moved)
            if length:
                self._move(moved, length)
                ahead = self._validation(weight_CE)
                self._move(moved, -length)
                behind = self._validation(weight_CE)
                self._parameters.write(self._weights)
                factor = self.settings.learning_rate / (4.0 * length)
                direction = combined(lambda one, a, b: one - factor * (a - b), direction, ahead, behind)
        return _scaled(direction, scale)

    def _value_by_unit(self, rows: Sequence[Example], share_B: F64) -> tuple[list[Tensor], F64]:
        """Every unit's own loss: the rows' gradients are the matrices, the units pass by."""
        sums = WeightedSums(self.engine, share_B[None])
        run_over(self.engine, rows, [sums])
        scale = self._scale(sums.matrices)
        moved = _scaled(sums.matrices, scale)
        at_once = max(1, DIRECTION_ELEMENTS // self.engine.layers.size)
        parts = [self._unit_values(rows[i : i + at_once], scale, moved) for i in range(0, len(rows), at_once)]
        value_BE = self.settings.learning_rate * share_B[:, None] * np.concatenate(parts)
        return [total[0] for total in sums.matrices], value_BE

    def _unit_values(self, rows: Sequence[Example], scale: Matrices | None, moved: Matrices) -> F64:
        """<P g_i, g_e - eta / 2 H_e d> of some rows and all units."""
        each = EachGradient(self.engine, len(rows))
        run_over(self.engine, rows, [each])
        directions = _scaled(each.matrices, scale)
        value_EB = self._unit_products(directions)
        length = self._difference_length(moved) if self.settings.order == 2 else 0.0
        if length:
            self._move(moved, length)
            ahead_EB = self._unit_products(directions)
            self._move(moved, -length)
            behind_EB = self._unit_products(directions)
            self._parameters.write(self._weights)
            value_EB = value_EB - self.settings.learning_rate / (4.0 * length) * (ahead_EB - behind_EB)
        return value_EB.T

    def _unit_products(self, directions: Matrices) -> F64:
        products = InnerProducts(self.engine, directions, len(self._units))
        run_over(self.engine, self._units, [products])
        return products.products

    # ------------------------------------------------------------------------------------------- the step

    def _scale(self, gradient: Matrices) -> list[Tensor] | None:
        """P of this step, (X, Y) a block, from Adam's second moment with this batch in it; none: SGD."""
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

    def _difference_length(self, moved: Matrices) -> float:
        """How far to go along d in a difference; 0 where d is 0."""
        size = norm_of(moved)
        return RELATIVE_STEP * max(norm_of(self._weights), 1.0) / size if size else 0.0

    def _move(self, moved: Matrices, length: float) -> None:
        self._parameters.write(combined(lambda weight, d: weight + length * d[0], self._weights, moved))

    # ------------------------------------------------------------------------------------------- the state

    def save(self, path: Path) -> None:
        """Keep weights, moments and step; the file appears when it is whole."""
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
        """Go on from a state that was kept."""
        with safe_open(path, framework="pt", device=str(self.engine.model.device)) as file:
            self.step = int(file.metadata()["step"])
            for k, weight in enumerate(self._weights):
                weight.copy_(file.get_tensor(f"weight.{k}"))
                self._optimizer.state[weight] = {
                    "step": torch.tensor(float(self.step)),
                    **{moment: file.get_tensor(f"{moment}.{k}") for moment in ("exp_avg", "exp_avg_sq")},
                }
        self._parameters.write(self._weights)


def _scaled(matrices: Matrices, scale: Matrices | None) -> list[Tensor]:
    return list(matrices) if scale is None else combined(lambda one, by: one * by, matrices, scale)


def refuse_non_finite(value_BC: F64, row_index_B: I64, step: int) -> None:
    """See that values are numbers.

    Raises:
        ModelError: one is not; the message names step and row.
    """
    bad = np.argwhere(~np.isfinite(value_BC))
    if len(bad):
        raise ModelError(
            f"replay: step {step}: value of row {row_index_B[bad[0, 0]]} is {value_BC[tuple(bad[0])]}, expected a "
            "number; lower learning_rate, or leave the row out"
        )


def steps_of(n_rows: int, batch_rows: int) -> int:
    """Steps of one epoch; the last batch may be short."""
    return math.ceil(n_rows / batch_rows)
