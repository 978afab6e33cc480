"""Preprocessing of images for a classifier: a PIL image becomes the array that the model reads.

There are three implementations of `Preprocessing`. `ResizeAndCrop` follows the settings `model.classifier.images`;
`HuggingFaceProcessor` is the image processor of a checkpoint; `TimmTransform` is the evaluation transform of a timm
module. Start with `Preprocessing`; `default_preprocessing` chooses one for a module without settings.

Shape letter: C channels.
"""

import importlib
import json
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from grasp.errors import ModelError
from grasp.extras import require
from grasp.models.checkpoint import load_auxiliary
from grasp.settings import ModelSettings
from grasp.vision.settings import ImageSettings

FULL_BYTE = 255.0  # value of a saturated 8-bit channel
# What the user can do if the preprocessing of a checkpoint fails; the end of an error message.
SETTINGS_HINT = "set model.classifier.images (size, mean, std, ...) instead"


class Preprocessing(Protocol):
    """Turns a PIL image in RGB into (C, height, width), float32."""

    @property
    def identity(self) -> Any:
        """JSON of everything that determines the output; part of the fingerprint of a build."""

    def __call__(self, image: Any) -> NDArray[np.float32]: ...


@dataclass(frozen=True, slots=True)
class ResizeAndCrop:
    """Resizes the shorter side, crops the centre, scales to [0, 1] and normalises: (C, size, size)."""

    settings: ImageSettings

    @property
    def identity(self) -> Any:
        return self.settings.model_dump(mode="json")

    def __call__(self, image: Any) -> NDArray[np.float32]:
        pil = require("PIL.Image", extra="vision", feature="reading images")
        settings = self.settings
        shorter_side = settings.resize or settings.size
        scale = shorter_side / min(image.size)
        # max: rounding must not make a side shorter than the crop
        width, height = (max(shorter_side, round(side * scale)) for side in image.size)
        image = image.resize((width, height), pil.Resampling[settings.interpolation.upper()])
        left, top = (width - settings.size) // 2, (height - settings.size) // 2
        image = image.crop((left, top, left + settings.size, top + settings.size))
        pixels = np.asarray(image, dtype=np.float32) / np.float32(FULL_BYTE)
        normalised = (pixels - np.asarray(settings.mean, np.float32)) / np.asarray(settings.std, np.float32)
        return np.ascontiguousarray(normalised.transpose(2, 0, 1))


@dataclass(frozen=True, slots=True)
class HuggingFaceProcessor:
    """Image processor of a Hugging Face checkpoint, run by transformers."""

    processor: Any

    @classmethod
    def from_settings(cls, settings: ModelSettings) -> Self:
        """Load the processor, with the PIL backend if it has one: equal results with and without torchvision.

        Raises:
            ModelError: the checkpoint has no processor, or the installed libraries cannot load it.
        """
        from transformers import AutoImageProcessor  # noqa: PLC0415 - slow to import

        # `backend` is an option of transformers 5, `use_fast` of 4; each version ignores the other's
        backend_options = {"backend": "pil", "use_fast": False}
        try:
            return cls(load_auxiliary(AutoImageProcessor, settings, "has no image processor", **backend_options))
        except (ModelError, TypeError, AttributeError) as err:
            raise ModelError(f"{' '.join(str(err).split())}; {SETTINGS_HINT}") from err

    @property
    def identity(self) -> Any:
        return json.loads(self.processor.to_json_string())

    def __call__(self, image: Any) -> NDArray[np.float32]:
        try:
            outputs = self.processor(images=[image], return_tensors="np")
        except (ValueError, TypeError, KeyError, ImportError) as err:
            raise ModelError(
                f"preprocessor_config.json: {type(self.processor).__name__} failed on an image of {image.width} x "
                f"{image.height} pixels: {' '.join(str(err).split())[:200]}; {SETTINGS_HINT}"
            ) from err
        if list(outputs) != ["pixel_values"]:
            raise ModelError(
                f"preprocessor_config.json: {type(self.processor).__name__} returns {', '.join(outputs)}, expected "
                f"pixel_values only; {SETTINGS_HINT}"
            )
        return np.ascontiguousarray(outputs["pixel_values"][0], dtype=np.float32)


@dataclass(frozen=True, slots=True)
class TimmTransform:
    """Evaluation transform of timm for the data config of a timm module."""

    config: dict[str, Any]
    transform: Any

    @property
    def identity(self) -> Any:
        return {"timm": {name: self.config[name] for name in sorted(self.config)}}

    def __call__(self, image: Any) -> NDArray[np.float32]:
        pixels: Tensor = self.transform(image)
        return np.ascontiguousarray(pixels.numpy(), dtype=np.float32)


def default_preprocessing(model: nn.Module) -> Preprocessing:
    """Return the transform that a timm module declares; for other modules that of ImageNet at 224 pixels."""
    is_timm = any(base.__module__.partition(".")[0] == "timm" for base in type(model).__mro__)
    if is_timm and hasattr(model, "pretrained_cfg"):
        data = importlib.import_module("timm.data")  # installed, since the module is from timm
        config = data.resolve_model_data_config(model)
        return TimmTransform(config, data.create_transform(**config, is_training=False))
    return ResizeAndCrop(ImageSettings())
