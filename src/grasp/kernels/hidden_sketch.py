"""The sketch of a row's mean hidden state: whitened, then projected so that inner products are preserved.

Shape letters: B rows, P positions, H hidden width, D sketch width.
"""

import torch
from torch import Tensor

from grasp.kernels.kernel import Batch
from grasp.kernels.sketch import SummarySketch, gaussian_projection


class HiddenSketch(SummarySketch):
    """The sketch of hidden states. Source: eq:feature-sketch of the paper."""

    name = "hidden_sketch"

    @property
    def width(self) -> int:
        return min(self.settings.hidden_width, self.model.hidden_size)

    def prepare(self, units: Batch) -> None:
        whitener = self.whitener()
        project_DH = gaussian_projection(self.settings.hidden_width, self.model.hidden_size, self.settings.seed)
        self._mean_H = torch.from_numpy(whitener.mean_H).to(self.model.device)
        # Whitening and projection are linear and applied to the mean of a row, so one matrix does both.
        self._map_HD = torch.from_numpy(whitener.map_HH @ project_DH.T).to(self.model.device)

    def score(self, batch: Batch) -> Tensor:
        pooled = batch.summary_batch or batch
        sum_BH = self._mean_H.new_zeros(pooled.n_rows, len(self._mean_H)).index_add_(
            0, pooled.row_P, pooled.hidden_PH.double()
        )
        return ((sum_BH / pooled.positions_B[:, None] - self._mean_H) @ self._map_HD).float()
