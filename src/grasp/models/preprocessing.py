"""How a picture becomes what a classifier reads: by settings, by the processor of a checkpoint, by timm's data config.

Shape letters: C channels (3).
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
from grasp.models.causal_lm import load_beside
from grasp.settings import ImageSettings, ModelSettings

RESAMPLING = ("nearest", "lanczos", "bilinear", "bicubic")  # in the order of PIL's numbers
FULL_BYTE = 255.0
INSTEAD = "give model.classifier.images (size, mean, std, ...) instead"


class Preprocessing(Protocol):
    """Turns a picture of PIL in RGB into (C, height, width), float32."""

    @property
    def identity(self) -> Any:
        """JSON of all that decides what comes out."""

    def __call__(self, image: Any) -> NDArray[np.float32]: ...


@dataclass(frozen=True, slots=True)
class BySettings:
    """Resized by its shorter side, cropped at the centre, scaled to [0, 1], normalised: (C, size, size)."""

    settings: ImageSettings

    @property
    def identity(self) -> Any:
        return self.settings.model_dump(mode="json")

    def __call__(self, image: Any) -> NDArray[np.float32]:
        pil = require("PIL.Image", extra="vision", feature="reading images")
        settings = self.settings
        how = pil.Resampling(RESAMPLING.index(settings.interpolation))
        short = settings.resize or settings.size
        scale = short / min(image.size)
        image = image.resize((max(short, round(image.width * scale)), max(short, round(image.height * scale))), how)
        left, top = (image.width - settings.size) // 2, (image.height - settings.size) // 2
        image = image.crop((left, top, left + settings.size, top + settings.size))
        values = np.asarray(image, dtype=np.float32) / np.float32(FULL_BYTE)
        scaled = (values - np.asarray(settings.mean, np.float32)) / np.asarray(settings.std, np.float32)
        return np.ascontiguousarray(scaled.transpose(2, 0, 1))


@dataclass(frozen=True, slots=True)
class ByProcessor:
    """The image processor that a Hugging Face checkpoint brings, run by transformers itself."""

    processor: Any

    @classmethod
    def of(cls, settings: ModelSettings) -> Self:
        """Load it, in the form that works on PIL where it has one: the same numbers with and without torchvision.

        Raises:
            ModelError: the checkpoint has none, or one that the installed libraries cannot load.
        """
        from transformers import AutoImageProcessor  # noqa: PLC0415 - slow to import

        # the first word is that of transformers 5, the second of 4: each passes over the other's
        how = {"backend": "pil", "use_fast": False}
        try:
            return cls(load_beside(AutoImageProcessor, settings, "has no image processor", **how))
        except (ModelError, TypeError, AttributeError) as err:
            raise ModelError(f"{' '.join(str(err).split())}; {INSTEAD}") from err

    @property
    def identity(self) -> Any:
        return json.loads(self.processor.to_json_string())

    def __call__(self, image: Any) -> NDArray[np.float32]:
        try:
            found = self.processor(images=[image], return_tensors="np")
        except (ValueError, TypeError, KeyError, ImportError) as err:
            raise ModelError(
                f"preprocessor_config.json: {type(self.processor).__name__} failed on a picture of {image.width} x "
                f"{image.height} pixels: {' '.join(str(err).split())[:200]}; {INSTEAD}"
            ) from err
        if list(found) != ["pixel_values"]:
            raise ModelError(
                f"preprocessor_config.json: {type(self.processor).__name__} gives {', '.join(found)}, expected "
                f"pixel_values alone; {INSTEAD}"
            )
        return np.ascontiguousarray(found["pixel_values"][0], dtype=np.float32)


@dataclass(frozen=True, slots=True)
class ByTimm:
    """The evaluation transform of timm for the data config that a module of timm carries."""

    config: dict[str, Any]
    transform: Any

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """By the config of the module itself."""
        data = importlib.import_module("timm.data")  # there, since the module came from it
        config = data.resolve_model_data_config(model)
        return cls(config, data.create_transform(**config, is_training=False))

    @property
    def identity(self) -> Any:
        return {"timm": {name: self.config[name] for name in sorted(self.config)}}

    def __call__(self, image: Any) -> NDArray[np.float32]:
        pixels: Tensor = self.transform(image)
        return np.ascontiguousarray(pixels.numpy(), dtype=np.float32)


def own_preprocessing(model: nn.Module) -> Preprocessing:
    """What a module that a factory made says of its pictures; one that says nothing gets ImageNet's at 224 pixels."""
    of_timm = any(kind.__module__.partition(".")[0] == "timm" for kind in type(model).__mro__)
    return ByTimm.of(model) if of_timm and hasattr(model, "pretrained_cfg") else BySettings(ImageSettings())
