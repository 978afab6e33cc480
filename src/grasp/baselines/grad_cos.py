"""Gradient cosine: exact cosine of the gradients of row and unit, at one checkpoint, without projection.

Start with `GradCos`.
"""

from pydantic import Field

from grasp.baselines.gradients.cosine import CosineForm, CosineMethod
from grasp.baselines.gradients.method_settings import LayerSettings, Patterns
from grasp.methods.contract import MethodInputs


class GradCosSettings(LayerSettings):
    """Parameters covered, and whether gradients are normalised."""

    layers: Patterns = Field(
        ("all",), description="Parameters covered, as for tracin: all, or a part such as head, body or embedding."
    )
    normalise: bool = Field(True, description="Divide by both norms; false: plain inner product.")


class GradCos(CosineMethod[GradCosSettings]):
    """Exact cosine of whole gradients at the last checkpoint.

    The inner product of the gradients is the first-order effect of a training step on the row; the cosine removes the
    norms. It is computed from the factors of the gradients, so that no whole gradient is formed.

    Source: Charpiat et al. 2019; compared with other similarities by Hanawa et al. 2021 (arXiv 2006.04528).
    As published: gradients of all parameters of small classifiers.
    Deviation: none.
    """

    settings_type = GradCosSettings

    def form(self, inputs: MethodInputs) -> CosineForm:
        del inputs
        settings = self.settings
        return CosineForm("last", "equal", None, "auto", settings.normalise, settings.normalise)
