"""LESS, adapted to pretraining: cosine of a unit's gradient with the Adam update of a row.

Start with `Less`. If checkpoints have no Adam moments, the row's gradient takes the place of its update.
"""

from collections.abc import Mapping
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from grasp.baselines.checkpoints import Checkpoint, read_recipe
from grasp.baselines.gradients.layers import as_matrix
from grasp.baselines.gradients.method_settings import WeightedSettings
from grasp.baselines.gradients.scorers import select_checkpoints
from grasp.baselines.gradients.whole import Transform
from grasp.baselines.tracin import CosineMethod
from grasp.errors import ModelError, SettingsError
from grasp.methods.contract import MethodInputs
from grasp.models.gradients import PerExample
from grasp.settings import refuse_idle
from grasp.training.train import RECORD

EPSILON = 1e-8  # Adam's eps, under the root as in the code of LESS


class LessSettings(WeightedSettings):
    """LESS-adapted: checkpoints by learning rate, normalised projected gradients."""

    adam: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Represent rows by Adam's update instead of the gradient, as LESS does. auto: if every checkpoint "
        "has Adam's moments. Paper: never, since its checkpoints have none.",
    )
    betas: tuple[float, float] | None = Field(
        None, description="Decay rates of Adam's moments; null: those of the training recipe. LESS: 0.9, 0.999."
    )

    @model_validator(mode="after")
    def _has_moments(self) -> Self:
        if self.adam == "never":
            refuse_idle(self, ("betas",), "adam: never uses no moments")
        return self


class Less(CosineMethod[LessSettings]):
    """Gradients of units against Adam's steps on rows, normalised (adapted).

    Cosine of a unit's gradient with the step that Adam would take on the row, summed over checkpoints with their
    learning rates as weights.

    Source: Xia et al. 2024 (arXiv 2402.04333), section 3.
    As published: a warm-up with LoRA on a small share of the data, whose checkpoints give gradients and Adam's moments;
    gradients are projected to 8,192 numbers.
    Deviation: adapted to pretraining as in the GRASP paper's appendix: checkpoints of the full training, no LoRA.
    Weights are divided by their sum; moments are those of the whole run, not of a warm-up.
    """

    settings_type = LessSettings

    def extra_identity(self, inputs: MethodInputs) -> Mapping[str, Any]:
        if not self.uses_update(inputs):
            return {"moments": []}
        checkpoints = select_checkpoints(inputs, self.settings.checkpoints)
        return {"moments": [checkpoint.moments_fingerprint for checkpoint in checkpoints]}

    def update(self, checkpoint: Checkpoint, engine: PerExample) -> Transform:
        moments, betas, record = checkpoint.moments(), self.settings.betas, checkpoint.path / RECORD
        if betas is None:
            if not record.is_file():
                raise ModelError(f"{record}: Adam's betas are not recorded; set less.betas")
            betas = read_recipe(record)[0].betas
        first, second = (
            [
                as_matrix(block, {name: pair[k] for name, pair in moments.items()}).to(engine.model.device, engine.work)
                for block in engine.layers.blocks
            ]
            for k in (0, 1)
        )
        return adam_update(first, second, betas)

    def uses_update(self, inputs: MethodInputs) -> bool:
        if self.settings.adam == "never":
            return False
        missing = [
            checkpoint
            for checkpoint in select_checkpoints(inputs, self.settings.checkpoints)
            if not checkpoint.has_moments
        ]
        if missing and self.settings.adam == "always":
            raise SettingsError(
                f"less.adam: got always, but {missing[0].path} has no Adam moments ({len(missing)} such); set auto or "
                "never, or save the optimizer state in training"
            )
        return not missing


def adam_update(first: list[Tensor], second: list[Tensor], betas: tuple[float, float]) -> Transform:
    """Return a transform that replaces a gradient g by Adam's next step, block by block:

        (b1 m + (1 - b1) g) / sqrt(b2 v + (1 - b2) g^2 + eps)

    Source: LESS, equation of Gamma and its public code: eps under the root, and no bias correction, which would scale
    all coordinates equally.
    """
    beta1, beta2 = betas
    first, second = [beta1 * moment for moment in first], [beta2 * moment + EPSILON for moment in second]

    def transform(number: int, gradient_BXY: Tensor) -> Tensor:
        square = torch.addcmul(second[number], gradient_BXY, gradient_BXY, value=1.0 - beta2)
        return torch.add(first[number], gradient_BXY, alpha=1.0 - beta1).div_(square.sqrt_())

    return transform
