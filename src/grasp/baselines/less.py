"""LESS, adapted to pretraining: normalised gradients, of rows as Adam would step where its moments are kept."""

import json
from collections.abc import Mapping
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from grasp.baselines.checkpoints import Checkpoint
from grasp.baselines.gradients.cosine import CosineForm, CosineMethod
from grasp.baselines.gradients.layers import as_matrix
from grasp.baselines.gradients.method_settings import WeightedSettings
from grasp.baselines.gradients.queries import Transform
from grasp.baselines.gradients.session import chosen_checkpoints
from grasp.baselines.gradients.store import Update
from grasp.errors import ModelError, SettingsError
from grasp.methods.contract import MethodInputs
from grasp.models.gradients import PerExample
from grasp.settings import refuse_idle
from grasp.training.train import RECORD

EPSILON = 1e-8


class LessSettings(WeightedSettings):
    """LESS-adapted: checkpoints by learning rate, normalised projected gradients."""

    adam: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Rows by Adam's update instead of the gradient, as LESS has it. auto: where every checkpoint keeps "
        "Adam's moments. Paper: never, its checkpoints have none.",
    )
    betas: tuple[float, float] | None = Field(
        None, description="Decay of Adam's moments; null: as the recipe beside them says. LESS: 0.9, 0.999."
    )

    @model_validator(mode="after")
    def _has_moments(self) -> Self:
        if self.adam == "never":
            refuse_idle(self, ("betas",), "adam: never takes no moments")
        return self


class Less(CosineMethod[LessSettings]):
    """Gradients of units against Adam's steps on rows, normalised (adapted).

    Cosine of a unit's gradient with the step that Adam would take on the row, summed over checkpoints.

    Source: Xia et al. 2024, section 3; adapted: all of the model's training, no LoRA, the paper's appendix.
    Deviation: weights are divided by their sum; moments are those of the whole run, not of a warm-up.
    """

    settings_type = LessSettings

    def decided_by(self, material: MethodInputs) -> Mapping[str, Any]:
        if not self._adam(material):
            return {"moments": []}
        return {"moments": [one.moments_fingerprint for one in self._checkpoints(material)]}

    def form(self, material: MethodInputs) -> CosineForm:
        own = self.settings
        name = f"adam {own.betas}" if self._adam(material) else ""
        return CosineForm(own.checkpoints, own.weights, own.dimension, own.projection, True, True, name)

    def update(self, checkpoint: Checkpoint) -> Update | None:
        moments, betas = checkpoint.moments(), self.settings.betas or recorded_betas(checkpoint)

        def update(engine: PerExample) -> Transform:
            first, second = ({name: pair[k] for name, pair in moments.items()} for k in (0, 1))
            return adam_update(
                [as_matrix(block, first).to(engine.model.device, engine.work) for block in engine.layers.blocks],
                [as_matrix(block, second).to(engine.model.device, engine.work) for block in engine.layers.blocks],
                betas,
            )

        return update

    def _adam(self, material: MethodInputs) -> bool:
        if self.settings.adam == "never":
            return False
        without = [one for one in chosen_checkpoints(material, self.settings.checkpoints) if not one.has_moments]
        if without and self.settings.adam == "always":
            raise SettingsError(
                f"less.adam: got always, but {without[0].path} keeps no Adam moments ({len(without)} such); set auto "
                "or never, or keep the optimizer's state in training"
            )
        return not without


def adam_update(first: list[Tensor], second: list[Tensor], betas: tuple[float, float]) -> Transform:
    """What Adam's next step would be in place of a gradient g, block by block:

        (b1 m + (1 - b1) g) / sqrt(b2 v + (1 - b2) g^2 + eps)

    Source: LESS, equation of Gamma and its public code: eps under the root, no bias correction, which scales all
    coordinates alike.
    """
    beta1, beta2 = betas
    first, second = [beta1 * moment for moment in first], [beta2 * moment + EPSILON for moment in second]

    def transform(number: int, gradient_BXY: Tensor) -> Tensor:
        square = torch.addcmul(second[number], gradient_BXY, gradient_BXY, value=1.0 - beta2)
        return torch.add(first[number], gradient_BXY, alpha=1.0 - beta1).div_(square.sqrt_())

    return transform


def recorded_betas(checkpoint: Checkpoint) -> tuple[float, float]:
    """Betas of the recipe beside the moments.

    Raises:
        ModelError: they are not written down.
    """
    path = checkpoint.path / RECORD
    try:
        first, second = json.loads(path.read_text(encoding="utf-8"))["identity"]["recipe"]["betas"]
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise ModelError(f"{path}: says nothing of Adam's betas; set less.betas") from err
    return float(first), float(second)
