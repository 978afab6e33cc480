"""The sketch of token-level products of hidden states and residuals, which the direct sum of the paper lacks.

Shape letters: B rows, D sketch width.
"""

from torch import Tensor

from grasp.kernels.kernel import Batch
from grasp.kernels.sketch import ProductMaps, Sketch
from grasp.kernels.whitening import HiddenMoments, Whitener


class ProductSketch(Sketch):
    """The sketch of token-level products; see `ProductMaps`."""

    name = "product_sketch"
    moment_types = (HiddenMoments,)

    @property
    def width(self) -> int:
        return self.settings.residual_width

    def prepare(self, units: Batch) -> None:
        whitener = Whitener.from_settings(self.moments(HiddenMoments).value, self.settings)
        self._maps = ProductMaps.prepare(whitener, self.width, self.settings.seed, self.model.device)

    def score(self, batch: Batch) -> Tensor:
        return self._maps.apply(batch.hidden_PH, batch.residual, batch.row_P, batch.n_rows)
