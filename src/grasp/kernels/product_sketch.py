"""The sketch of the product of hidden states and mistakes, position by position: what the direct sum gives up.

Shape letters: B rows, D sketch width.
"""

from torch import Tensor

from grasp.kernels.kernel import Batch
from grasp.kernels.sketch import ProductMaps, Sketch
from grasp.kernels.whitening import HiddenMoments, Whitener


class ProductSketch(Sketch):
    """The sketch as a build calls it."""

    name = "product_sketch"
    kinds = (HiddenMoments,)

    @property
    def width(self) -> int:
        return self.settings.product_width

    def prepare(self, units: Batch) -> None:
        whitener = Whitener.of(self.moments(HiddenMoments).value, self.settings)
        self._maps = ProductMaps.prepare(whitener, self.width, self.settings.seed, self.model.device)

    def score(self, batch: Batch) -> Tensor:
        return self._maps.apply(batch.hidden_PH, batch.residual, batch.row_P, batch.n_rows)


KERNEL = ProductSketch
