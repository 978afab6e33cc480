r"""The inner product of gradients with respect to a linear map of the hidden states, from one forward pass.

    a_{i,e} = 1/(|P_i||P_e|) sum_{t in P_i} sum_{s in P_e} <h~_t, h~_s> <delta~_t, delta~_s>

P_i and P_e are the positions with loss of row i and unit e. h are hidden states, and delta = U^T xi is the gradient of
the loss with respect to them, with output matrix U and residual xi (`hidden_gradient`). A tilde means whitened; h~ is
centred before. Both are whitened with a large ridge, since a corpus determines few of the H^2 directions.

The gradient of a matrix M that acts on the hidden states, h + M (h - mean), is sum_t delta_t (x) (h_t - mean): the
kernel compares which tokens a row makes more likely in *similar* contexts. `hidden_bias` compares them in any context:
it is the gradient of a vector that is added to every hidden state. `output_layer` has the residual xi itself, with a
coordinate for every token; delta has H coordinates, so that rare tokens, whose moments are noisy, have none of their
own.

The inner product of two outer products is the product of two inner products, so it is computed per pair of positions by
two matrix products; the H x H gradients of rows and units are never formed. Start with `hidden_linear_relevance`.
Labels `eq:` in "Source" are those of the paper; docs/paper_map.md lists them.

Shape letters: P row positions, S unit positions, N rows, E units, H hidden width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from grasp.kernels.kernel import Kernel
from grasp.kernels.knn import unit_positions_per_block
from grasp.kernels.whitening import DeltaMoments, HiddenMoments, SecondMoments, whitening_map
from grasp.models.batch import Batch

RIDGE = 1.0  # in units of tr / H: at 0.1 rankings depend on the sample of moments (experiments/finetune)


@dataclass(frozen=True, slots=True)
class HiddenLinearTargets:
    """The units' side of the kernel, computed once per build."""

    mean_H: Tensor
    hidden_SH: Tensor  # W_h^2 (h_s - mean) / |P_e|
    delta_SH: Tensor  # W_d^2 delta_s
    unit_S: Tensor
    n_units: int


def prepare_hidden_linear(
    hidden_SH: Tensor,
    delta_SH: Tensor,
    unit_S: Tensor,
    n_units: int,
    hidden_moments: SecondMoments,
    delta_moments: SecondMoments,
) -> HiddenLinearTargets:
    """Fold the whitening of both sides and the mean over a unit's positions into the units.

    Args:
        hidden_SH: hidden states at the units' supervised positions.
        delta_SH: `hidden_gradient`, U^T xi, at the same positions.
        unit_S: unit of each position.
        n_units: number of units.
        hidden_moments: moments of hidden states.
        delta_moments: moments of `hidden_gradient`.
    Source: ours, not in the paper; as eq:kfac-inner-product, of a matrix that acts on the hidden states.
    """
    device = hidden_SH.device
    mean_H = torch.from_numpy(hidden_moments.mean_H).to(device)
    # The square of a whitening map W on the units' side replaces W on both sides: <W x, W y> = <x, W^2 y>, as W is
    # symmetric.
    squared_hidden_map_HH, squared_delta_map_HH = (
        torch.from_numpy(map_HH @ map_HH).to(device)
        for map_HH in (
            whitening_map(hidden_moments.covariance_HH, RIDGE),
            whitening_map(delta_moments.second_moment, RIDGE),
        )
    )
    positions_S = torch.bincount(unit_S, minlength=n_units)[unit_S]
    white_hidden_SH = (hidden_SH.double() - mean_H) @ squared_hidden_map_HH / positions_S[:, None]
    white_delta_SH = delta_SH.double() @ squared_delta_map_HH
    return HiddenLinearTargets(mean_H.float(), white_hidden_SH.float(), white_delta_SH.float(), unit_S, n_units)


def hidden_linear_relevance(
    targets: HiddenLinearTargets, hidden_PH: Tensor, delta_PH: Tensor, row_P: Tensor, n_rows: int
) -> Tensor:
    """Predict the relevance of `n_rows` rows to all units, (n_rows, E), float32.

    Args:
        targets: the units' side, from `prepare_hidden_linear`.
        hidden_PH: hidden states at the rows' used positions.
        delta_PH: `hidden_gradient` at the same positions.
        row_P: row of each position, in [0, n_rows).
        n_rows: number of rows.
    Positive: training on the row should lower the unit's loss. Cost: 4 H S operations per position.
    """
    centred_PH = hidden_PH.float() - targets.mean_H
    sum_NE = centred_PH.new_zeros(n_rows, targets.n_units)
    step = unit_positions_per_block(row_P)
    for start in range(0, len(targets.unit_S), step):  # blocks of unit positions bound the memory of the (P, S) pairs
        block = slice(start, start + step)
        pair_PS = (centred_PH @ targets.hidden_SH[block].T).mul_(delta_PH @ targets.delta_SH[block].T)
        pair_NS = pair_PS.new_zeros(n_rows, pair_PS.shape[1]).index_add_(0, row_P, pair_PS)
        sum_NE.index_add_(1, targets.unit_S[block], pair_NS)
    return sum_NE / torch.bincount(row_P, minlength=n_rows).clamp(min=1)[:, None]


class HiddenLinear(Kernel):
    """The kernel of a linear map of the hidden states."""

    name = "hidden_linear"
    moment_types = (HiddenMoments, DeltaMoments)

    def prepare(self, units: Batch) -> None:
        moments = self.moments(HiddenMoments).value, self.moments(DeltaMoments).value
        # the rows of a batch of units are the units
        self._targets = prepare_hidden_linear(units.hidden_PH, units.delta_PH, units.row_P, units.n_rows, *moments)

    def score(self, batch: Batch) -> Tensor:
        return hidden_linear_relevance(self._targets, batch.hidden_PH, batch.delta_PH, batch.row_P, batch.n_rows)
