"""An image classifier as a reference model: preprocessing, the input of its linear head, and the head.

Start with `ImageClassifier.load`. Supports any torch module whose output is a named linear layer: of torchvision, timm,
Hugging Face or user code. One image is one supervised position: h is the head's input, xi = softmax - onehot(class).

Shape letters: B images of a batch, C channels, P positions (one an image), H hidden width, V classes.
"""

import hashlib
import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from grasp.errors import ModelError
from grasp.extras import require
from grasp.models.causal_lm import weights_fingerprint
from grasp.models.checkpoint import device_of, dtype_of, load_auxiliary, load_checkpoint
from grasp.models.forward_pass import BatchFeatures, Pass
from grasp.models.head import TOLERANCE, OutputHead
from grasp.models.residuals import head_residual
from grasp.settings import ClassifierSettings, ImageSettings, ModelSettings
from grasp.vision.factory import make_module, user_code
from grasp.vision.fitted_head import FittedHead, linear_head
from grasp.vision.images import ImageShard, decode_image

RESAMPLING = ("nearest", "lanczos", "bilinear", "bicubic")  # in the order of PIL's numbers
FULL_BYTE = 255.0
REMEDY = "set model.classifier.images (size, mean, std, ...) instead"
PROBE_IMAGE_SIZE = (96, 160)  # height and width of the random images that a head is checked with
# exceptions of a module that does not accept such images
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError, AssertionError)


class ImageClassifier:
    """Frozen image classifier that returns the inputs of its linear head."""

    def __init__(self, model: nn.Module, settings: ClassifierSettings, preprocessing: "Preprocessing") -> None:
        self.model = model.eval().requires_grad_(False)
        self.linear = linear_head(model, settings.head)
        self.head = OutputHead(self.linear)
        self.vocab_size, self.hidden_size = self.linear.out_features, self.linear.in_features
        self.classes = settings.classes
        self.preprocessing = preprocessing
        self.batch_images = settings.batch_images
        self._name = settings.head
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype

    @classmethod
    def load(cls, settings: ModelSettings) -> Self:
        """Create the module, load its weights, install a fitted head, and check that head(hidden) equals its logits.

        Raises:
            ModelError: no such model; the factory returns no module; the weights do not fit; the head does not exist,
                is not linear, or is not the last layer; the number of class names differs from the head's outputs.
        """
        classifier_settings = settings.classifier
        assert classifier_settings is not None
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        device = device_of(settings.device)
        load_module = _load_hugging_face if classifier_settings.factory is None else _load_factory_model
        model, preprocessing, classes = load_module(settings, classifier_settings)
        if classifier_settings.fitted_head is not None:
            fitted_head = FittedHead.read(Path(classifier_settings.fitted_head))
            fitted_head.install(model, classifier_settings.head)
            classes = fitted_head.classes
        classifier_settings = classifier_settings.model_copy(update={"classes": classifier_settings.classes or classes})
        classifier = cls(
            model.to(device=device, dtype=dtype_of(settings.dtype, device)), classifier_settings, preprocessing
        )
        classifier._check_classes()
        if settings.check:
            classifier.check_head()
        return classifier

    @property
    def batching(self) -> dict[str, Any]:
        """Settings of the forward pass that may change results by rounding."""
        return {"batch_images": self.batch_images}

    @property
    def reader(self) -> tuple[str, str]:
        """Kind and fingerprint of what turns an image into the model's input."""
        text = json.dumps([self.preprocessing.identity, list(self.classes)])
        return "preprocessing", hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def pixels(self, encoded: Sequence[bytes]) -> Tensor:
        """Decode and preprocess images, (B, C, height, width), float32, on the CPU.

        Raises:
            ModelError: an image cannot be decoded, or preprocessing returns different shapes.
        """
        images = [decode_image(content) for content in encoded]
        if any(image is None for image in images):
            raise ModelError("images: a stored image can no longer be decoded; rebuild the artifact")
        return self._preprocess(images)

    def passes(self, rows: ImageShard, n_specs: int, top_k: int) -> Iterator[Pass]:
        """Yield batches of images: their indices and features."""
        for start in range(0, len(rows), self.batch_images):
            index = np.arange(start, min(start + self.batch_images, len(rows)))
            pixels_BCHW = self.pixels([rows.encoded[i] for i in index])
            yield index, self.features(pixels_BCHW, torch.from_numpy(rows.class_N[index]), n_specs, top_k)

    @torch.inference_mode()
    def features(self, pixels_BCHW: Tensor, class_B: Tensor, n_specs: int, top_k: int) -> BatchFeatures:
        """Compute the features of a batch of images: one position each, for every specification of positions.

        Args:
            class_B: true class of each image.
            n_specs: number of specifications of positions.
        Source: eq:token-residual, with classes instead of tokens. Deviation: an image has one supervised position.
        """
        hidden_BH = self.hidden(pixels_BCHW)
        class_B = class_B.to(self.device)
        every = torch.ones(len(hidden_BH), dtype=torch.bool, device=self.device)
        return BatchFeatures(
            hidden_PH=hidden_BH.float(),
            residual=head_residual(self.head, hidden_BH, class_B, top_k, self.vocab_size),
            row_P=torch.arange(len(hidden_BH), device=self.device),
            input_P=torch.zeros_like(class_B),
            position_masks=(every,) * n_specs,
        )

    @torch.inference_mode()
    def hidden(self, pixels_BCHW: Tensor) -> Tensor:
        """Return the head's input for each image, (B, H), model dtype."""
        return self._run(pixels_BCHW)[0]

    @torch.inference_mode()
    def logits(self, hidden_PH: Tensor) -> Tensor:
        """Return the logits, (P, V), float32."""
        return self.head.link(self.head.linear_logits(hidden_PH.to(self.dtype)).float())

    @torch.inference_mode()
    def check_head(self) -> None:
        """Compare head(hidden) with the output of the module on two random images.

        Raises:
            ModelError: the head is not called exactly once with one vector per image, or is not the last layer.
        """
        pil = require("PIL.Image", extra="vision", feature="reading images")
        noise = np.random.default_rng(0).integers(0, 256, size=(2, *PROBE_IMAGE_SIZE, 3), dtype=np.uint8)
        pixels_BCHW = self._preprocess([pil.fromarray(pixels) for pixels in noise])
        try:
            hidden_BH, model_logits = self._run(pixels_BCHW)
        except FAILURES as err:
            raise ModelError(
                f"{type(self.model).__name__} failed on images of shape {tuple(pixels_BCHW.shape[1:])}: "
                f"{' '.join(str(err).split())[:300]}; set model.classifier.images to the preprocessing of its training"
            ) from err
        head_logits = self.logits(hidden_BH)
        model_logits = model_logits.float()
        tolerance = TOLERANCE[self.dtype] * max(float(head_logits.std()), 1e-6)
        if model_logits.shape != head_logits.shape or not float((model_logits - head_logits).abs().max()) <= tolerance:
            raise ModelError(
                f"model.classifier.head: `{self._name}` is not the last layer of {type(self.model).__name__}: its "
                f"output, of shape {tuple(head_logits.shape)}, differs from that of the model, of shape "
                f"{tuple(model_logits.shape)}, by more than {tolerance:.2g}; name the layer that computes the logits"
            )

    def fingerprint(self) -> str:
        """Return a blake2b hash of the loaded weights, and of the source code of a user-defined module."""
        return weights_fingerprint(self.model, user_code(self.model))

    def _run(self, pixels_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the head and the output of the module."""
        seen: list[Tensor] = []
        hook = self.linear.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
        try:
            output = self.model(pixels_BCHW.to(device=self.device, dtype=self.dtype))
        finally:
            hook.remove()
        if len(seen) != 1 or seen[0].shape != (len(pixels_BCHW), self.hidden_size):
            shapes = [tuple(tensor.shape) for tensor in seen]
            raise ModelError(
                f"model.classifier.head: `{self._name}` was called {len(seen)} times, with inputs of shape {shapes}; "
                f"expected once, with one vector of width {self.hidden_size} per image"
            )
        return seen[0], output if isinstance(output, Tensor) else output.logits

    def _preprocess(self, images: Sequence[Any]) -> Tensor:
        values = [self.preprocessing(image) for image in images]
        shapes = {array.shape for array in values}
        if len(shapes) > 1:
            raise ModelError(
                f"preprocessing: images of one batch have shapes {', '.join(map(str, sorted(shapes)))}, expected equal "
                "ones; set model.classifier.images with a size"
            )
        return torch.from_numpy(np.stack(values))

    def _check_classes(self) -> None:
        if self.classes and len(self.classes) != self.vocab_size:
            raise ModelError(
                f"model.classifier.classes: got {len(self.classes)} names, but the head `{self._name}` "
                f"has {self.vocab_size} outputs; name every class, in the order of the outputs"
            )


def _load_factory_model(
    settings: ModelSettings, chosen: ClassifierSettings
) -> "tuple[nn.Module, Preprocessing, tuple[str, ...]]":
    """Create the module with the factory, and load its weights from the file."""
    model = make_module(chosen)
    _load_weights(model, Path(settings.path))
    return model, _configured_preprocessing(chosen) or default_preprocessing(model), ()


def _configured_preprocessing(chosen: ClassifierSettings) -> "Preprocessing | None":
    return None if chosen.images is None else BySettings(chosen.images)


def _load_weights(model: nn.Module, path: Path) -> None:
    """Load weights from a safetensors or torch.save file; unpickles tensors only."""
    if not path.is_file():
        raise ModelError(
            f"model.path: `{path}`: no such file; expected the weights of the module, .safetensors or .pth"
        )
    try:
        if path.suffix == ".safetensors":
            weights: Any = load_file(path)
        else:
            weights = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as err:  # torch's own text advises to load it unsafely
        raise ModelError(
            f"model.path: cannot read weights from `{path}`: it holds more than tensors, or is damaged; expected a "
            "state dict, e.g. torch.save(module.state_dict(), path)"
        ) from err
    except (OSError, RuntimeError, SafetensorError, EOFError, ValueError) as err:
        raise ModelError(f"model.path: cannot read weights from `{path}`: {' '.join(str(err).split())[:200]}") from err
    if isinstance(weights, Mapping) and isinstance(weights.get("state_dict"), Mapping):
        weights = weights["state_dict"]
    try:
        model.load_state_dict(weights)
    except (RuntimeError, TypeError, AttributeError) as err:
        raise ModelError(
            f"model.path: `{path}` does not fit {type(model).__name__}: {' '.join(str(err).split())[:300]}"
        ) from err


def _load_hugging_face(
    settings: ModelSettings, chosen: ClassifierSettings
) -> "tuple[nn.Module, Preprocessing, tuple[str, ...]]":
    """Load a transformers checkpoint, its preprocessing, and the names of its classes."""
    from transformers import AutoModelForImageClassification  # noqa: PLC0415 - slow to import

    model = load_checkpoint(AutoModelForImageClassification, settings, "is not an image classifier")
    names: Mapping[Any, str] = model.config.id2label
    classes = tuple(names[k] for k in sorted(names, key=int))
    return model, _configured_preprocessing(chosen) or ByProcessor.from_settings(settings), classes


# ------------------------------------------------------------------------------------------------ preprocessing


class Preprocessing(Protocol):
    """Turns a PIL image in RGB into (C, height, width), float32."""

    @property
    def identity(self) -> Any:
        """JSON of everything that determines the output."""

    def __call__(self, image: Any) -> NDArray[np.float32]: ...


@dataclass(frozen=True, slots=True)
class BySettings:
    """Resizes by the shorter side, crops the centre, scales to [0, 1] and normalises: (C, size, size)."""

    settings: ImageSettings

    @property
    def identity(self) -> Any:
        return self.settings.model_dump(mode="json")

    def __call__(self, image: Any) -> NDArray[np.float32]:
        pil = require("PIL.Image", extra="vision", feature="reading images")
        settings = self.settings
        resampling = pil.Resampling(RESAMPLING.index(settings.interpolation))
        short = settings.resize or settings.size
        scale = short / min(image.size)
        image = image.resize(
            (max(short, round(image.width * scale)), max(short, round(image.height * scale))), resampling
        )
        left, top = (image.width - settings.size) // 2, (image.height - settings.size) // 2
        image = image.crop((left, top, left + settings.size, top + settings.size))
        values = np.asarray(image, dtype=np.float32) / np.float32(FULL_BYTE)
        scaled = (values - np.asarray(settings.mean, np.float32)) / np.asarray(settings.std, np.float32)
        return np.ascontiguousarray(scaled.transpose(2, 0, 1))


@dataclass(frozen=True, slots=True)
class ByProcessor:
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
            raise ModelError(f"{' '.join(str(err).split())}; {REMEDY}") from err

    @property
    def identity(self) -> Any:
        return json.loads(self.processor.to_json_string())

    def __call__(self, image: Any) -> NDArray[np.float32]:
        try:
            outputs = self.processor(images=[image], return_tensors="np")
        except (ValueError, TypeError, KeyError, ImportError) as err:
            raise ModelError(
                f"preprocessor_config.json: {type(self.processor).__name__} failed on an image of {image.width} x "
                f"{image.height} pixels: {' '.join(str(err).split())[:200]}; {REMEDY}"
            ) from err
        if list(outputs) != ["pixel_values"]:
            raise ModelError(
                f"preprocessor_config.json: {type(self.processor).__name__} returns {', '.join(outputs)}, expected "
                f"pixel_values only; {REMEDY}"
            )
        return np.ascontiguousarray(outputs["pixel_values"][0], dtype=np.float32)


@dataclass(frozen=True, slots=True)
class ByTimm:
    """Evaluation transform of timm for the data config of a timm module."""

    config: dict[str, Any]
    transform: Any

    @classmethod
    def from_model(cls, model: nn.Module) -> Self:
        """Create the transform from the config of the module."""
        data = importlib.import_module("timm.data")  # installed, since the module is from timm
        config = data.resolve_model_data_config(model)
        return cls(config, data.create_transform(**config, is_training=False))

    @property
    def identity(self) -> Any:
        return {"timm": {name: self.config[name] for name in sorted(self.config)}}

    def __call__(self, image: Any) -> NDArray[np.float32]:
        pixels: Tensor = self.transform(image)
        return np.ascontiguousarray(pixels.numpy(), dtype=np.float32)


def default_preprocessing(model: nn.Module) -> Preprocessing:
    """Return the preprocessing that a factory's module declares; default: that of ImageNet at 224 pixels."""
    of_timm = any(kind.__module__.partition(".")[0] == "timm" for kind in type(model).__mro__)
    return ByTimm.from_model(model) if of_timm and hasattr(model, "pretrained_cfg") else BySettings(ImageSettings())
