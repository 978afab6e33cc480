"""The sketch of a row's mean residual: preconditioned, then projected so that inner products are preserved.

Shape letters: B rows, P positions, K kept per residual, V vocabulary, D sketch width.
"""

import numpy as np
import torch
from torch import Tensor

from grasp.kernels.kernel import Batch
from grasp.kernels.sketch import CountSketch, SummarySketch


class ResidualSketch(SummarySketch):
    """The sketch of residuals. Source: eq:feature-sketch of the paper."""

    name = "residual_sketch"

    @property
    def width(self) -> int:
        return self.settings.residual_width

    def prepare(self, units: Batch) -> None:
        sketch = CountSketch.draw(self.model.vocab_size, self.width, self.settings.seed, "residual")
        self._bucket_V = torch.from_numpy(sketch.bucket).to(self.model.device)
        # D^{1/2} on both sides of an inner product is the D of the residual match.
        weight_V = sketch.sign * np.sqrt(self.whitener().precondition_V)
        self._weight_V = torch.from_numpy(weight_V).float().to(self.model.device)

    def score(self, batch: Batch) -> Tensor:
        pooled = batch.summary_batch or batch
        index_PK = pooled.residual.index_PK
        value_PK = pooled.residual.value_PK.float() * self._weight_V[index_PK]
        # index_add_ over (row, bucket) sums the coordinates of all positions of a row in one pass
        bucket_PK = pooled.row_P[:, None] * self.width + self._bucket_V[index_PK]
        sum_BD = value_PK.new_zeros(pooled.n_rows * self.width).index_add_(0, bucket_PK.flatten(), value_PK.flatten())
        return sum_BD.view(pooled.n_rows, self.width) / pooled.positions_B[:, None]
