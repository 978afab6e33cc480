"""TracIn: cosines of gradients, summed over checkpoints by their learning rates."""

from pydantic import Field

from grasp.baselines.gradients.cosine import CosineForm, CosineMethod
from grasp.baselines.gradients.method_settings import WeightedSettings
from grasp.methods.contract import MethodInputs


class TracInSettings(WeightedSettings):
    """TracIn as the paper has it; dimension: null is the method without projection noise."""

    normalise: bool = Field(
        True, description="Divide gradients by their norms: cosines. Paper: yes; the original TracIn: no."
    )


class TracIn(CosineMethod[TracInSettings]):
    """Cosines of gradients, over checkpoints by learning rate.

    Learning-rate-weighted inner products of the gradients of row and unit at checkpoints of the training.

    Source: Pruthi et al. 2020 (TracInCP); normalised, on one block and the final norm, projected: the paper's appendix.
    Deviation: weights are divided by their sum; the gradient of a row is that of its mean loss a token.
    """

    settings_type = TracInSettings

    def form(self, material: MethodInputs) -> CosineForm:
        del material
        own = self.settings
        return CosineForm(own.checkpoints, own.weights, own.dimension, own.projection, own.normalise, own.normalise)
