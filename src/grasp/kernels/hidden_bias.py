r"""The inner product of gradients with respect to a bias of the hidden states, from one forward pass.

    a_{i,e} = <delta~_i, delta~_e>,  delta_i = 1/|P_i| sum_{t in P_i} W^T xi_t

It compares which tokens a row and a unit make more likely, independent of the context: style rather than facts. A short
fine-tuning of a pretrained model changes little else. It equals the kernel `embedding` without the condition that input
tokens agree and without their weights. Since the sum over pairs factorises, a row is reduced to its mean gradient.
Start with `hidden_bias_relevance`. Labels `eq:` in "Source" are those of the paper; docs/paper_map.md lists them.

Shape letters: P row positions, S unit positions, E units, H hidden width.
"""

import torch
from torch import Tensor

from grasp.kernels.kernel import Kernel
from grasp.kernels.whitening import DeltaMoments, Whitener
from grasp.models.batch import Batch


def prepare_hidden_bias(delta_SH: Tensor, unit_S: Tensor, n_units: int, whitener: Whitener) -> Tensor:
    """Return the units' mean gradients, whitened twice, (E, H), float32; rows then need no whitening.

    Args:
        delta_SH: `hidden_gradient` at the units' supervised positions.
        unit_S: unit of each position.
        n_units: number of units.
        whitener: fitted to their moments, uncentred.
    Source: ours, not in the paper; as eq:kfac-inner-product, of a bias of the hidden states.
    """
    # <W x, W y> = <x, W^2 y> since W is symmetric; in float64, since W^2 has the condition number of the moments
    square_HH = torch.from_numpy(whitener.map_HH @ whitener.map_HH).to(delta_SH.device)
    return (_row_means(delta_SH.double(), unit_S, n_units) @ square_HH).float()


def hidden_bias_relevance(unit_EH: Tensor, delta_PH: Tensor, row_P: Tensor, n_rows: int) -> Tensor:
    """Predict the relevance of `n_rows` rows to all units, (n_rows, E), float32.

    Args:
        unit_EH: the units' side, from `prepare_hidden_bias`.
        delta_PH: `hidden_gradient` at the rows' used positions.
        row_P: row of each position, in [0, n_rows).
        n_rows: number of rows.
    Positive: training on the row should lower the unit's loss.
    """
    return _row_means(delta_PH, row_P, n_rows) @ unit_EH.T


def _row_means(value_PH: Tensor, row_P: Tensor, n_rows: int) -> Tensor:
    """Return the mean of the vectors of each row, (N, H); 0 for a row without positions."""
    count_N = torch.bincount(row_P, minlength=n_rows).clamp(min=1)
    return value_PH.new_zeros(n_rows, value_PH.shape[1]).index_add_(0, row_P, value_PH) / count_N[:, None]


class HiddenBias(Kernel):
    """The kernel of a bias of the hidden states."""

    name = "hidden_bias"
    moment_types = (DeltaMoments,)

    def prepare(self, units: Batch) -> None:
        whitener = Whitener.from_settings(self.moments(DeltaMoments).value, self.settings, centred=False)
        self._unit_EH = prepare_hidden_bias(units.delta_PH, units.row_P, units.n_rows, whitener)

    def score(self, batch: Batch) -> Tensor:
        return hidden_bias_relevance(self._unit_EH, batch.delta_PH, batch.row_P, batch.n_rows)
