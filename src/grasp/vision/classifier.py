"""An image classifier as a reference model: how it is shown a picture, what its linear head reads of it, and the head.

Any torch module whose output is a linear layer with a name: of torchvision, of timm, a Hugging Face image classifier,
one's own. One image is one supervised position: h is the head's input, xi = softmax - onehot(class).

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
from grasp.vision.factory import make_module, own_code
from grasp.vision.fitted_head import FittedHead, linear_head
from grasp.vision.images import ImageShard, decode_image

RESAMPLING = ("nearest", "lanczos", "bilinear", "bicubic")  # in the order of PIL's numbers
FULL_BYTE = 255.0
INSTEAD = "give model.classifier.images (size, mean, std, ...) instead"
NOISE = (96, 160)  # height and width of the pictures that a head is checked with
# what a module may raise that does not take such pictures
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError, AssertionError)


class ImageClassifier:
    """Frozen image classifier that gives what its head reads, and the head."""

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
        """Make the module, read its weights, put a fitted head in place; prove that head(hidden) equals its logits.

        Raises:
            ModelError: nothing there; a factory that makes no module; weights of another one; a head that is not
                there, not linear, or not the module's last layer; as many names of classes as the head does not have.
        """
        chosen = settings.classifier
        assert chosen is not None
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        device = device_of(settings.device)
        make = _hugging_face if chosen.factory is None else _made
        model, preprocessing, classes = make(settings, chosen)
        if chosen.fitted_head is not None:
            fitted = FittedHead.read(Path(chosen.fitted_head))
            fitted.put(model, chosen.head)
            classes = fitted.classes
        chosen = chosen.model_copy(update={"classes": chosen.classes or classes})
        found = cls(model.to(device=device, dtype=dtype_of(settings.dtype, device)), chosen, preprocessing)
        found._check_classes()
        if settings.check:
            found.check_head()
        return found

    @property
    def batching(self) -> dict[str, Any]:
        """What of a forward pass may move the last digits of the numbers."""
        return {"batch_images": self.batch_images}

    @property
    def reader(self) -> tuple[str, str]:
        """What turns an image into the model's input, and its fingerprint."""
        text = json.dumps([self.preprocessing.identity, list(self.classes)])
        return "preprocessing", hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def pixels(self, encoded: Sequence[bytes]) -> Tensor:
        """Images as the model sees them, (B, C, height, width), float32, on the CPU.

        Raises:
            ModelError: no image can be made of some bytes, or their preprocessing gives them different sizes.
        """
        images = [decode_image(content) for content in encoded]
        if any(image is None for image in images):
            raise ModelError("images: one that was read before can no longer be decoded; build the artifact again")
        return self._prepared(images)

    def passes(self, rows: ImageShard, n_specs: int, top_k: int) -> Iterator[Pass]:
        """Batches of images, each with the index of its images and their features."""
        for start in range(0, len(rows), self.batch_images):
            index = np.arange(start, min(start + self.batch_images, len(rows)))
            pixels_BCHW = self.pixels([rows.encoded[i] for i in index])
            yield index, self.features(pixels_BCHW, torch.from_numpy(rows.class_N[index]), n_specs, top_k)

    @torch.inference_mode()
    def features(self, pixels_BCHW: Tensor, class_B: Tensor, n_specs: int, top_k: int) -> BatchFeatures:
        """Features of one batch of images: one position each, whatever the specifications of positions say.

        Args:
            class_B: the true class of each image.
            n_specs: specifications that the caller will ask for.
        Source: eq:token-residual, with classes for tokens. Deviation: an image has one supervised position.
        """
        hidden_BH = self.hidden(pixels_BCHW)
        class_B = class_B.to(self.device)
        every = torch.ones(len(hidden_BH), dtype=torch.bool, device=self.device)
        return BatchFeatures(
            hidden_PH=hidden_BH.float(),
            residual=head_residual(self.head, hidden_BH, class_B, top_k, self.vocab_size),
            row_P=torch.arange(len(hidden_BH), device=self.device),
            input_P=torch.zeros_like(class_B),
            chosen=(every,) * n_specs,
        )

    @torch.inference_mode()
    def hidden(self, pixels_BCHW: Tensor) -> Tensor:
        """What the head reads of each image, (B, H), model dtype."""
        return self._run(pixels_BCHW)[0]

    @torch.inference_mode()
    def logits(self, hidden_PH: Tensor) -> Tensor:
        """Logits as the softmax sees them, (P, V), float32."""
        return self.head.link(self.head.linear_logits(hidden_PH.to(self.dtype)).float())

    @torch.inference_mode()
    def check_head(self) -> None:
        """Compare head(hidden) with the module's own output on two pictures of noise.

        Raises:
            ModelError: the head is not called, is not called once with a vector an image, or something comes after it.
        """
        pil = require("PIL.Image", extra="vision", feature="reading images")
        noise = np.random.default_rng(0).integers(0, 256, size=(2, *NOISE, 3), dtype=np.uint8)
        pixels_BCHW = self._prepared([pil.fromarray(one) for one in noise])
        try:
            hidden_BH, own = self._run(pixels_BCHW)
        except FAILURES as err:
            raise ModelError(
                f"{type(self.model).__name__} failed on pictures of shape {tuple(pixels_BCHW.shape[1:])}: "
                f"{' '.join(str(err).split())[:300]}; set model.classifier.images to what it was trained on"
            ) from err
        ours = self.logits(hidden_BH)
        own = own.float()
        allowed = TOLERANCE[self.dtype] * max(float(ours.std()), 1e-6)
        if own.shape != ours.shape or not float((own - ours).abs().max()) <= allowed:
            raise ModelError(
                f"model.classifier.head: `{self._name}` is not the last layer of {type(self.model).__name__}: its "
                f"output of shape {tuple(ours.shape)} is not the model's, of shape {tuple(own.shape)}, within "
                f"{allowed:.2g}; name the layer that gives the logits"
            )

    def fingerprint(self) -> str:
        """blake2b over the weights as loaded, and over the code of a module of the user's own."""
        return weights_fingerprint(self.model, own_code(self.model))

    def _run(self, pixels_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """What the head read, and what the module gave."""
        seen: list[Tensor] = []
        hook = self.linear.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        try:
            output = self.model(pixels_BCHW.to(device=self.device, dtype=self.dtype))
        finally:
            hook.remove()
        if len(seen) != 1 or seen[0].shape != (len(pixels_BCHW), self.hidden_size):
            shapes = [tuple(tensor.shape) for tensor in seen]
            raise ModelError(
                f"model.classifier.head: `{self._name}` was called {len(seen)} times, with inputs of shape {shapes}; "
                f"expected once, with one vector of {self.hidden_size} an image"
            )
        return seen[0], output if isinstance(output, Tensor) else output.logits

    def _prepared(self, images: Sequence[Any]) -> Tensor:
        values = [self.preprocessing(image) for image in images]
        shapes = {one.shape for one in values}
        if len(shapes) > 1:
            raise ModelError(
                f"preprocessing: pictures of one batch have the shapes {', '.join(map(str, sorted(shapes)))}, expected "
                "one; give model.classifier.images with a size"
            )
        return torch.from_numpy(np.stack(values))

    def _check_classes(self) -> None:
        if self.classes and len(self.classes) != self.vocab_size:
            raise ModelError(
                f"model.classifier.classes: got {len(self.classes)} names, the head `{self._name}` has "
                f"{self.vocab_size} outputs; name every class, in the order of the head"
            )


def _made(settings: ModelSettings, chosen: ClassifierSettings) -> "tuple[nn.Module, Preprocessing, tuple[str, ...]]":
    """The module that a factory makes, with the weights of the file."""
    model = make_module(chosen)
    _load_weights(model, Path(settings.path))
    return model, _chosen(chosen) or own_preprocessing(model), ()


def _chosen(chosen: ClassifierSettings) -> "Preprocessing | None":
    return None if chosen.images is None else BySettings(chosen.images)


def _load_weights(model: nn.Module, path: Path) -> None:
    """Weights from a file of safetensors or of torch.save; nothing but tensors is unpickled."""
    if not path.is_file():
        raise ModelError(
            f"model.path: `{path}`: no such file; expected the weights of the module, .safetensors or .pth"
        )
    try:
        if path.suffix == ".safetensors":
            found: Any = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, SafetensorError, UnpicklingError, EOFError, ValueError) as err:
        raise ModelError(
            f"model.path: `{path}` holds no weights that can be read: {' '.join(str(err).split())[:200]}"
        ) from err
    if isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping):
        found = found["state_dict"]
    try:
        model.load_state_dict(found)
    except (RuntimeError, TypeError, AttributeError) as err:
        raise ModelError(
            f"model.path: `{path}` does not fit {type(model).__name__}: {' '.join(str(err).split())[:300]}"
        ) from err


def _hugging_face(
    settings: ModelSettings, chosen: ClassifierSettings
) -> "tuple[nn.Module, Preprocessing, tuple[str, ...]]":
    """A checkpoint of transformers, its preprocessing, and the names of its classes."""
    from transformers import AutoModelForImageClassification  # noqa: PLC0415 - slow to import

    model = load_checkpoint(AutoModelForImageClassification, settings, "is not an image classifier")
    names: Mapping[Any, str] = model.config.id2label
    classes = tuple(names[k] for k in sorted(names, key=int))
    return model, _chosen(chosen) or ByProcessor.from_settings(settings), classes


# ------------------------------------------------------------------------------- how a picture becomes an input


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
    def from_settings(cls, settings: ModelSettings) -> Self:
        """Load it, in the form that works on PIL where it has one: the same numbers with and without torchvision.

        Raises:
            ModelError: the checkpoint has none, or one that the installed libraries cannot load.
        """
        from transformers import AutoImageProcessor  # noqa: PLC0415 - slow to import

        # the first word is that of transformers 5, the second of 4: each passes over the other's
        how = {"backend": "pil", "use_fast": False}
        try:
            return cls(load_auxiliary(AutoImageProcessor, settings, "has no image processor", **how))
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
    def from_model(cls, model: nn.Module) -> Self:
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
    return ByTimm.from_model(model) if of_timm and hasattr(model, "pretrained_cfg") else BySettings(ImageSettings())
