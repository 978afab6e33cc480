"""TracIn: cosines of gradients, summed over checkpoints weighted by learning rate.

Start with `TracIn`; the computation is in `grasp.baselines.gradients.cosine`.
"""

from pydantic import Field

from grasp.baselines.gradients.cosine import CosineForm, CosineMethod
from grasp.baselines.gradients.method_settings import WeightedSettings
from grasp.methods.contract import MethodInputs


class TracInSettings(WeightedSettings):
    """TracIn as in the GRASP paper; `dimension: null` is the method without projection noise."""

    normalise: bool = Field(
        True, description="Divide gradients by their norms (cosines). Paper: yes; original TracIn: no."
    )


class TracIn(CosineMethod[TracInSettings]):
    """Cosines of gradients, over checkpoints by learning rate.

    Inner products of the gradients of row and unit at checkpoints of the training, weighted by learning rate.

    Source: Pruthi et al. 2020 (TracInCP, arXiv 2002.08484).
    As published: plain inner products, at checkpoints of the training, often of the last layer alone.
    Deviation: normalised, on one block and the final norm, and projected, as in the GRASP paper's appendix; weights are
    divided by their sum; the gradient of a row is that of its mean loss per token.
    """

    settings_type = TracInSettings

    def form(self, inputs: MethodInputs) -> CosineForm:
        del inputs
        settings = self.settings
        return CosineForm(
            settings.checkpoints,
            settings.weights,
            settings.dimension,
            settings.projection,
            settings.normalise,
            settings.normalise,
        )
