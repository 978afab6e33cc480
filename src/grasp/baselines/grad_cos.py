"""The exact cosine of the gradients of row and unit: no projection, one checkpoint, all parameters."""

from pydantic import Field

from grasp.baselines.gradients.cosine import CosineForm, CosineMethod
from grasp.baselines.gradients.method_settings import LayerSettings, Patterns
from grasp.methods.contract import MethodInputs


class GradCosSettings(LayerSettings):
    """Which parameters, and which norms."""

    layers: Patterns = Field(
        ("all",), description="Parameters covered, as for tracin: all, or a part such as head, body or embedding."
    )
    normalise: bool = Field(True, description="Divide by both norms; false: the plain inner product.")


class GradCos(CosineMethod[GradCosSettings]):
    """Exact cosine of whole gradients at the last checkpoint.

    Cosine of whole gradients at the last checkpoint, by the factorised form.

    Source: none, it is what first order says of one step. Deviation: none.
    """

    settings_type = GradCosSettings

    def form(self, material: MethodInputs) -> CosineForm:
        del material
        own = self.settings
        return CosineForm("last", "equal", None, "auto", own.normalise, own.normalise)
