r"""A training run in which the rows of each batch get Shapley values of the decrease of validation losses.

Start with `Replay`.

The formulas are those of In-Run Data Shapley (Wang et al. 2025, arXiv 2406.11011). It is not the replay of
`grasp.training`, which differentiates a whole training.

A step of SGD with learning rate eta moves the covered parameters by -eta sum_i d_i, where d_i = c_i g_i: g_i is the
gradient of row i's mean loss, c_i its share of the batch's labels (so that sum_i d_i is the gradient of the batch's
loss, a mean over labels). The training itself takes steps of AdamW; rows are valued as if the step were one of SGD, as
published. The utility of a subset S of the batch is the decrease of the validation loss L in a step on S alone,

    U(S) = L(w) - L(w - eta sum_{i in S} d_i)
         ~ eta <g_val, sum_S d_i> - eta^2 / 2 (sum_S d_i)^T H_val (sum_S d_i)

and the Shapley values of the two terms are

    first order     eta <g_val, d_i>
    second order    eta <g_val, d_i> - eta^2 / 2 d_i^T H_val d,    d = sum_j d_j over the batch

H_val d is computed by central differences of g_val along d. Each value is an inner product of a row's gradient with
matrices that are shared by the whole batch, so no row's gradient is formed.

A block is one parameter of the model, seen as a matrix (X, Y); lists of tensors below have one per block.

Shape letters: B rows of the batch, C columns (validation losses), X rows and Y columns of a block, N examples, K sums.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from grasp.arrays import F64
from grasp.baselines.gradients.layers import choose_layers
from grasp.files import atomic_path
from grasp.models.causal_lm import ReferenceModel
from grasp.models.gradient_sums import BlockParameters, InnerProducts, run_over
from grasp.models.gradients import Example, GradientFactors, PerExample

# Step of the difference along d, in units of the norm of the parameters. H d is then within 2e-4 of the exact product
# on small models of four families in float32; longer steps add truncation error, shorter ones rounding error.
RELATIVE_STEP = 1e-4
Matrices = Sequence[Tensor]  # one per block


class Replay:
    """Model, optimizer and step counter. `advance` values the rows of a batch and trains on it."""

    def __init__(
        self,
        model: ReferenceModel,
        units: Sequence[Example],
        weight_CE: F64,
        *,
        layers: Sequence[str],
        order: int,
        learning_rate: float,
        weight_decay: float,
    ) -> None:
        """Start a replay from `model`. The replay changes its weights: pass a copy.

        Args:
            units: the validation set.
            weight_CE: validation losses as weighted sums of the units' losses.
            order: order of the values, 1 or 2; see the module docstring.
        Raises:
            SettingsError, ModelError: the layers are not supported.
        """
        self.engine = PerExample(model, choose_layers(model, layers))
        self.step = 0
        self._order, self._learning_rate = order, learning_rate
        self._units, self._weight_CE = units, weight_CE
        self._parameters = BlockParameters(model.model, self.engine.layers, self.engine.work)
        self._weights = self._parameters.read()
        self._optimizer = torch.optim.AdamW(self._weights, lr=learning_rate, weight_decay=weight_decay)

    @property
    def n_columns(self) -> int:
        """Number of validation losses, C."""
        return len(self._weight_CE)

    def advance(self, rows: Sequence[Example]) -> F64:
        """Value the rows of a batch at the current weights, then train on it. Return values (B, C) in nats.

        Positive: the row lowers the validation loss.
        """
        labels_B = np.array([row.labels for row in rows], dtype=np.float64)
        share_B = labels_B / labels_B.sum()
        sums = WeightedSums(self.engine, share_B[None])  # d, the gradient of the batch's loss
        if self._order == 1:
            products = InnerProducts(self.engine, self._validation(), len(rows))
            run_over(self.engine, rows, [sums, products])
        else:
            run_over(self.engine, rows, [sums])
            products = InnerProducts(self.engine, self._direction(sums.matrices), len(rows))
            run_over(self.engine, rows, [products])
        for weight, total in zip(self._weights, sums.matrices, strict=True):
            weight.grad = total[0]
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._parameters.write(self._weights)
        self.step += 1
        return np.asarray(self._learning_rate * share_B[:, None] * products.products)

    def _validation(self) -> list[Tensor]:
        """Return the gradients of the validation losses at the current weights, (C, X, Y) per block."""
        sums = WeightedSums(self.engine, self._weight_CE)
        run_over(self.engine, self._units, [sums])
        return sums.matrices

    def _direction(self, step_d: Matrices) -> list[Tensor]:
        """Return g_val - eta / 2 H_val d, (C, X, Y) per block; its product with c_i g_i is the value of row i."""
        direction = self._validation()
        size = total_norm(step_d)
        if not size:
            return direction
        length = RELATIVE_STEP * max(total_norm(self._weights), 1.0) / size
        # H d = (g(w + length d) - g(w - length d)) / (2 length)
        self._move(step_d, length)
        forward = self._validation()
        self._move(step_d, -length)
        backward = self._validation()
        self._parameters.write(self._weights)
        factor = self._learning_rate / (4.0 * length)
        return [g - factor * (a - b) for g, a, b in zip(direction, forward, backward, strict=True)]

    def _move(self, step_d: Matrices, length: float) -> None:
        """Set the model's parameters to w + length d; `_weights` keeps w."""
        self._parameters.write([weight + length * d[0] for weight, d in zip(self._weights, step_d, strict=True)])

    # ------------------------------------------------------------------------------------------- state

    def save(self, path: Path) -> None:
        """Save weights, moments and step; the file is replaced atomically."""
        tensors = {f"weight.{k}": weight for k, weight in enumerate(self._weights)}
        for k, weight in enumerate(self._weights):
            state = self._optimizer.state[weight]
            tensors |= {f"{moment}.{k}": state[moment] for moment in ("exp_avg", "exp_avg_sq")}
        with atomic_path(path) as part:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part, {"step": str(self.step)})

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


class WeightedSums:
    """Collects K weighted sums of gradients: ``matrices[block][k] = sum_i weight_KN[k, i] G_i``, (K, X, Y) per block.

    A sum over examples is one matrix product, so that the gradient of a single example is not formed.
    """

    def __init__(self, engine: PerExample, weight_KN: F64) -> None:
        self._weight_KN = torch.from_numpy(weight_KN).to(engine.model.device, engine.work)
        self.matrices = [self._weight_KN.new_zeros(len(weight_KN), b.left, b.right) for b in engine.layers.blocks]

    def add(self, number: int, factors: GradientFactors, index_B: Tensor) -> None:
        """Add the gradients of some examples, without those of weight 0."""
        for total_XY, weight_B in zip(self.matrices[number], self._weight_KN[:, index_B], strict=True):
            nonzero = weight_B.nonzero()[:, 0]
            left, right = factors.left[nonzero], factors.right[nonzero] * weight_B[nonzero, None, None]
            if factors.one_hot:
                total_XY.index_add_(0, left.flatten(), right.flatten(0, 1))
            else:
                total_XY.addmm_(left.flatten(0, 1).T, right.flatten(0, 1))


def total_norm(matrices: Matrices) -> float:
    """Return the Euclidean norm over all blocks."""
    return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(matrix) for matrix in matrices])))
