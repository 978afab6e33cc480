r"""A game of 16 rows: the players move a model by one step of SGD together, the utility is what that takes off the loss
of each unit.

    U_e(S) = L_e(w) - L_e(w - eta sum_{i in S} g_i)         g_i: gradient of row i's mean loss; a sum, not a mean
           ~ eta sum_{i in S} <g_e, g_i> - eta^2 / 2 sum_{i,j in S} g_i^T H_e g_j

The validation loss is the mean over units; its game is the mean of theirs.

Shape letters: P players, B subsets, E units, X left width, Y right width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from grasp.arrays import F64
from grasp.baselines.gradients.layers import choose_layers
from grasp.baselines.gradients.whole import UnitGradients
from grasp.baselines.replay import Matrices, total_norm
from grasp.kernels.sketch import CountSketch
from grasp.models.causal_lm import ReferenceModel
from grasp.models.gradient_sums import BlockParameters, InnerProducts, run_over
from grasp.models.gradients import Example, PerExample
from grasp.models.unit_loss import evaluate_units
from grasp.targets.units import UnitTokens
from grasp.training.llama import new_llama
from grasp.training.recipe import TrainingRecipe

RELATIVE_STEP = 1e-4  # of a difference, in units of the norm of the parameters


@dataclass(frozen=True, slots=True)
class Expansion:
    """Predictions of the form eta sum_i linear_i - eta^2 / 2 sum_ij curvature_ij, one game a unit."""

    linear_PE: F64
    curvature_PPE: F64 | None = None  # symmetric

    def shapley(self, rate: float) -> F64:
        """Shapley values of the predicted game, (P, E): the curvature is shared out evenly between two players."""
        value_PE = rate * self.linear_PE
        return value_PE if self.curvature_PPE is None else value_PE - rate**2 / 2 * self.curvature_PPE.sum(axis=1)

    def utility(self, masks_BP: NDArray[np.bool_], rate: float) -> F64:
        """Predicted utilities of subsets, (B, E)."""
        weights_BP = masks_BP.astype(np.float64)
        value_BE: F64 = rate * weights_BP @ self.linear_PE
        if self.curvature_PPE is None:
            return value_BE
        curved_BE = np.einsum("bi,ije,bj->be", weights_BP, self.curvature_PPE, weights_BP)
        return np.asarray(value_BE - rate**2 / 2 * curved_BE)


class Gradients:
    """Per-example gradients of one model."""

    def __init__(self, model: ReferenceModel, layers: Sequence[str] = ("all",)) -> None:
        self.engine = PerExample(model, choose_layers(model, layers))
        self._parameters = BlockParameters(model.model, self.engine.layers, self.engine.work)
        self._weights = self._parameters.read()

    def compute(self, examples: Sequence[Example]) -> list[torch.Tensor]:
        """Gradients of mean losses, (P, X, Y) a block."""
        return UnitGradients.collect(self.engine, examples).matrices

    def products(self, players: Matrices, units: Sequence[Example]) -> F64:
        """<g_i, g_e> at the weights that the model has now, (P, E)."""
        products = InnerProducts(self.engine, players, len(units))
        run_over(self.engine, units, [products])
        return products.products.T

    def curvature(self, players: Matrices, units: Sequence[Example]) -> F64:
        """g_i^T H_e g_j by central differences of g_e along every g_i, made symmetric, (P, P, E)."""
        rows = []
        for i in range(len(players[0])):
            direction = [player[i] for player in players]
            size = total_norm(direction)
            length = RELATIVE_STEP * total_norm(self._weights) / size if size else 1.0
            self._move(direction, length)
            future_PE = self.products(players, units)
            self._move(direction, -length)
            behind_PE = self.products(players, units)
            rows.append((future_PE - behind_PE) / (2.0 * length))
        self._parameters.write(self._weights)
        pair_PPE: F64 = np.stack(rows)
        return np.asarray((pair_PPE + pair_PPE.transpose(1, 0, 2)) / 2.0)

    def _move(self, direction: Matrices, length: float) -> None:
        self._parameters.write([weight + length * d for weight, d in zip(self._weights, direction, strict=True)])

    def named(self, matrices: Matrices) -> dict[str, torch.Tensor]:
        """One gradient in the shapes and under the names of the parameters."""
        return {
            name: part.clone()
            for k, matrix in enumerate(matrices)
            for name, part in self._parameters.parameter_views(k, matrix)
        }


def sketched(players: Matrices, units: Matrices, width: int, seed: int) -> F64:
    """<g_i, g_e> from CountSketches of the whole gradients, (P, E)."""
    flat = [torch.cat([gradient.flatten(1) for gradient in side], dim=1).cpu().numpy() for side in (players, units)]
    sketch = CountSketch.draw(flat[0].shape[1], width, seed, "one-step")
    left, right = (side @ sketch.matrix(np.ones(side.shape[1])) for side in flat)
    return np.asarray(left @ right.T, dtype=np.float64)


class StepUtility:
    """Realized utilities: every subset's step is taken, and every unit's loss computed again."""

    def __init__(
        self,
        recipe: TrainingRecipe,
        state: dict[str, torch.Tensor],
        gradients: Sequence[dict[str, torch.Tensor]],
        units: Sequence[UnitTokens],
        rate: float,
    ) -> None:
        """Hold the model and the players' gradients, float32.

        Args:
            state: weights by Hugging Face name.
            gradients: of the players, likewise.
            rate: learning rate eta.
        """
        self._units, self._rate = units, rate
        self._model = new_llama(recipe.shape, seed=0)
        self._model.load_state_dict(state)
        self._start = {name: parameter.detach().clone() for name, parameter in self._model.named_parameters()}
        self._players = {name: torch.stack([gradient[name] for gradient in gradients]) for name in self._start}
        self._before_E = self._losses(np.zeros(len(gradients), dtype=bool))

    def __call__(self, masks_BP: NDArray[np.bool_]) -> F64:
        """(B, E), nats; positive: the step lowers the unit's loss."""
        return np.asarray(self._before_E - np.stack([self._losses(mask_P) for mask_P in masks_BP]))

    def _losses(self, mask_P: NDArray[np.bool_]) -> F64:
        """Units' losses after the step of a subset, (E,)."""
        step_P = torch.from_numpy(mask_P).float() * -self._rate
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(self._start[name] + torch.tensordot(step_P, self._players[name], dims=1))
        return evaluate_units(self._model, self._units)
