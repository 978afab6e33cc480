r"""The first-order effect of a row on a kernel language model, which predicts from nearby hidden states.

    a_{i,e} = 1/|P_e| sum_{s in P_e} [ A_is / (A_s + (lambda p_s + 1/M) B_s) - B_is / ((1 + lambda) B_s) ]
    B_is = 1/|P_i| sum_{t in P_i} k(h~_t, h~_s),  k(x, y) = exp(-|x - y|^2 / 2 tau^2)
    A_is: the same sum over the positions t whose next token is the unit's

A row helps if it has the unit's next token in a similar context, and harms if it has another one. The kernel language
model of a subset gives the unit's token the probability (sum_i A_is + lambda p_s B_s) / (sum_i B_is + lambda B_s), with
p_s the probability of the reference model; a_ie is the derivative of its logarithm with respect to the weight of row i.
A_s and B_s are means over M sampled positions of the corpus. A pseudo-count of one position at the unit's own hidden
state is added to B_s, and 1/M to lambda p_s, since tokens that the sample lacks may occur in the corpus. h~ is
whitened, and tau is a quarter of the root mean square distance of two positions. Start with `knn_relevance`.

Shape letters: P row positions, S unit positions, M sampled positions, E units, H hidden width, X = H + 2.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from grasp.arrays import F32, F64, I64
from grasp.kernels.kernel import Kernel
from grasp.kernels.whitening import HiddenMoments, SampledStates, SecondMoments, Whitener
from grasp.models.batch import Batch
from grasp.models.residuals import SparseResidual

KERNEL_WIDTH = 0.25  # tau, in root mean square distances
PRIOR = 0.1  # lambda
MAX_STORED = 32_768.0  # largest stored number; float16 ends at 65504
SAMPLED_POSITIONS = 2_048  # sampled positions that are processed at once
# Pairs per block: 4 MB in float32, which fits the cache of a core. A GPU needs larger blocks.
BLOCK_ELEMENTS = 1024 * 1024
GPU_BLOCK_ELEMENTS = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class KnnTargets:
    """The units' side of the kernel, computed once per build, with positions sorted by label."""

    mean_H: Tensor
    map_HH: Tensor  # whitening, divided by tau
    point_SX: Tensor  # whitened hidden states, extended as in `_extend_points`
    label_S: Tensor  # next token of each position
    # Weights of k, with the factor 1 / |P_e|: added at row positions with the same next token, subtracted at all.
    same_S: Tensor
    other_S: Tensor
    unit_S: Tensor  # unit of each position
    n_units: int

    @property
    def bound_E(self) -> Tensor:  # noqa: N802 - a shape suffix
        """Return an upper bound of |relevance|, (E,): k <= 1, reached if all positions coincide with the unit's."""
        bound_S = torch.maximum(self.same_S.abs(), self.other_S.abs())
        return bound_S.new_zeros(self.n_units).index_add_(0, self.unit_S, bound_S)


def prepare_knn(
    hidden_SH: Tensor,
    residual: SparseResidual,
    unit_S: Tensor,
    n_units: int,
    whitener: Whitener,
    moments: SecondMoments,
    states_MH: F32,
    label_M: I64,
    weight_S: Tensor | None = None,
) -> KnnTargets:
    """Fold whitening, tau and the means over the sampled positions into the units.

    Args:
        hidden_SH: hidden states at the units' supervised positions.
        residual: residuals, of which labels and losses are used.
        unit_S: unit of each position.
        n_units: number of units.
        whitener: whitening of hidden states.
        moments: moments to which `whitener` was fitted.
        states_MH: hidden states at sampled positions of the corpus.
        label_M: next token of each.
        weight_S: signed weight of each position of a unit, which is a sum of answers; None: 1.
    Source: ours, not in the paper; the linearised kernel language model.
    """
    device = hidden_SH.device
    label_S, by_label = torch.sort(residual.label_P, stable=True)
    hidden_SH, unit_S, loss_S = hidden_SH[by_label], unit_S[by_label], residual.loss_P[by_label]
    # E|h~ - h~'|^2 = 2 tr(W Sigma W) for independent positions; tr(A^T B) = sum of A * B avoids the last product.
    mean_square_distance = 2.0 * float(np.sum(whitener.map_HH * (moments.covariance_HH @ whitener.map_HH)))
    mean_H = torch.from_numpy(whitener.mean_H).float().to(device)
    map_HH = (
        torch.from_numpy(whitener.map_HH / (KERNEL_WIDTH * max(mean_square_distance, 1e-300) ** 0.5)).float().to(device)
    )
    point_SX = _extend_points((hidden_SH.float() - mean_H) @ map_HH)
    # swap the last two coordinates, see `_extend_points`
    point_SX = torch.cat([point_SX[:, :-2], point_SX[:, -1:], point_SX[:, -2:-1]], dim=1)
    point_MX = _extend_points((torch.from_numpy(states_MH).to(device) - mean_H) @ map_HH)
    labels_M = torch.from_numpy(label_M).to(device)
    n_sampled = len(labels_M)
    # M B_s and M A_s, summed over the sample in float64: exp() spans many orders of magnitude. The ones are the
    # pseudo-count of a position at the unit's own hidden state, where k = 1; it keeps the divisors above 0.
    all_S = torch.ones(len(label_S), dtype=torch.float64, device=device)
    same_S = torch.zeros_like(all_S)
    for start in range(0, n_sampled, SAMPLED_POSITIONS):
        block = slice(start, start + SAMPLED_POSITIONS)
        kernel_MS = torch.exp(point_MX[block] @ point_SX.T).double()
        all_S += kernel_MS.sum(dim=0)
        same_S += (kernel_MS * (labels_M[block, None] == label_S)).sum(dim=0)
    prior_S = PRIOR * torch.exp(-loss_S.double()) + 1 / n_sampled
    positions_S = torch.bincount(unit_S, minlength=n_units)[unit_S].double()
    if weight_S is not None:
        positions_S = positions_S / weight_S[by_label].double()  # a divisor below: the weight multiplies the result
    return KnnTargets(
        mean_H=mean_H,
        map_HH=map_HH,
        point_SX=point_SX,
        label_S=label_S,
        same_S=(n_sampled / (same_S + prior_S * all_S) / positions_S).float(),
        other_S=(n_sampled / ((1 + PRIOR) * all_S) / positions_S).float(),
        unit_S=unit_S,
        n_units=n_units,
    )


def knn_relevance(targets: KnnTargets, hidden_PH: Tensor, label_P: Tensor, row_P: Tensor, n_rows: int) -> Tensor:
    """Predict the relevance of `n_rows` rows to all units, (n_rows, E), float32.

    Args:
        targets: the units' side, from `prepare_knn`.
        hidden_PH: hidden states at the rows' used positions.
        label_P: next token at each of them.
        row_P: row of each position, in [0, n_rows).
        n_rows: number of rows.
    Positive: training on the row should lower the unit's loss. Cost: O(H S) per position.
    """
    point_PX, label_P = _extend_points((hidden_PH.float() - targets.mean_H) @ targets.map_HH), label_P.contiguous()
    sum_NE = point_PX.new_zeros(n_rows, targets.n_units)
    elements = BLOCK_ELEMENTS if row_P.device.type == "cpu" else GPU_BLOCK_ELEMENTS
    step = max(1, elements // max(1, len(row_P)))  # unit positions that are paired with all row positions at once
    for start in range(0, len(targets.unit_S), step):
        block = slice(start, start + step)
        kernel_PS = (point_PX @ targets.point_SX[block].T).exp_()
        kernel_NS = kernel_PS.new_zeros(n_rows, kernel_PS.shape[1]).index_add_(0, row_P, kernel_PS)
        sum_NE.index_add_(1, targets.unit_S[block], kernel_NS.mul_(-targets.other_S[block]))
        # Pairs of equal labels are few. Labels of the block are sorted, so those of a position are one range of it.
        # The ranges are concatenated: pair j has the row position p[j] and the unit position s[j].
        start_P = torch.searchsorted(targets.label_S[block], label_P)
        count_P = torch.searchsorted(targets.label_S[block], label_P, right=True) - start_P
        p = torch.repeat_interleave(torch.arange(len(label_P), device=label_P.device), count_P)
        s = torch.arange(len(p), device=p.device) + (start_P - (count_P.cumsum(0) - count_P))[p]
        flat_index = row_P[p] * targets.n_units + targets.unit_S[block][s]
        sum_NE.view(-1).index_add_(0, flat_index, kernel_PS[p, s] * targets.same_S[block][s])
    return sum_NE / torch.bincount(row_P, minlength=n_rows).clamp(min=1)[:, None]


def _extend_points(white_PH: Tensor) -> Tensor:
    """Return (x, -|x|^2 / 2, 1), whose inner product with (y, 1, -|y|^2 / 2) is -|x - y|^2 / 2.

    All exponents of the kernel then come from one matrix product.
    """
    half_P1 = -0.5 * white_PH.square().sum(dim=1, keepdim=True)
    return torch.cat([white_PH, half_P1, torch.ones_like(half_P1)], dim=1)


class Knn(Kernel):
    """The nearest-neighbour kernel."""

    name = "knn"
    moment_types = (HiddenMoments, SampledStates)
    unit = "logarithm of a probability, to first order; unitless"

    def prepare(self, units: Batch) -> None:
        hidden = self.moments(HiddenMoments).value
        whitener = Whitener.from_settings(hidden, self.settings)
        states_MH, label_M = self.moments(SampledStates).value
        self._targets = prepare_knn(
            units.hidden_PH,
            units.residual,
            units.row_P,
            units.n_rows,
            whitener,
            hidden,
            states_MH,
            label_M,
            units.weight_P,
        )

    def score(self, batch: Batch) -> Tensor:
        label_P = batch.residual.label_P
        return knn_relevance(self._targets, batch.hidden_PH, label_P, batch.row_P, batch.n_rows)

    def scale(self, units: Batch) -> F64:
        # The kernel is no inner product of gradients, so the bound replaces Cauchy-Schwarz of `relevance_scale`.
        bound_E = self._targets.bound_E.double().cpu().numpy()
        return np.asarray(np.exp2(np.maximum(np.ceil(np.log2(bound_E / MAX_STORED)), 0.0)))
