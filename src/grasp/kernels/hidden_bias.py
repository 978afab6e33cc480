r"""The inner product of gradients of one vector that is added to every hidden state, by one forward pass.

    a_{i,e} = <delta~_i, delta~_e>,  delta_i = 1/|P_i| sum_{t in P_i} W^T xi_t

It asks what a row and a unit want said more often, wherever it is said: the tone, not the fact. A short fine-tuning of
a model that knows the language moves little else. It is the mean of the kernel `embedding` over all pairs of positions,
whatever their tokens.
Shape letters: P row positions, S unit positions, E units, H hidden width.
"""

import torch
from torch import Tensor

from grasp.kernels.kernel import Batch, Kernel
from grasp.kernels.whitening import DeltaMoments, Whitener


def prepare_shift(delta_SH: Tensor, unit_S: Tensor, n_units: int, whitener: Whitener) -> Tensor:
    """Whitening and the mean over positions folded into the units, (E, H), float32.

    Args:
        delta_SH: `hidden_gradient` at the units' supervised positions.
        unit_S: which unit each belongs to.
        whitener: fitted to their moments, uncentred.
    Source: ours, not in the paper; as eq:kfac-inner-product, of a bias of the hidden states.
    """
    square_HH = torch.from_numpy(whitener.map_HH @ whitener.map_HH).to(delta_SH.device)
    return (_means(delta_SH.double(), unit_S, n_units) @ square_HH).float()


def shift_relevance(unit_EH: Tensor, delta_PH: Tensor, row_P: Tensor, n_rows: int) -> Tensor:
    """Relevance of `n_rows` rows for all units, (n_rows, E), float32.

    Args:
        delta_PH: `hidden_gradient` at the rows' used positions.
        row_P: which row each belongs to, in [0, n_rows).
    Positive: training on the row should lower the unit's loss.
    """
    return _means(delta_PH, row_P, n_rows) @ unit_EH.T


def _means(value_PH: Tensor, row_P: Tensor, n_rows: int) -> Tensor:
    count_N = torch.bincount(row_P, minlength=n_rows).clamp(min=1)
    return value_PH.new_zeros(n_rows, value_PH.shape[1]).index_add_(0, row_P, value_PH) / count_N[:, None]


class HiddenBias(Kernel):
    """The kernel as a build calls it."""

    name = "hidden_bias"
    kinds = (DeltaMoments,)

    def prepare(self, units: Batch) -> None:
        whitener = Whitener.of(self.moments(DeltaMoments).value, self.settings, centred=False)
        self._unit_EH = prepare_shift(units.delta_PH, units.row_P, units.n_rows, whitener)

    def score(self, batch: Batch) -> Tensor:
        return shift_relevance(self._unit_EH, batch.delta_PH, batch.row_P, batch.n_rows)


KERNEL = HiddenBias
