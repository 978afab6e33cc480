"""An image classifier as a reference model: what its linear head reads of an image, and the head.

Any torch module whose output is a linear layer with a name: of torchvision, of timm, a Hugging Face image classifier,
one's own. One image is one supervised position: h is the head's input, xi = softmax - onehot(class).

Shape letters: B images of a batch, C channels, P positions (one an image), H hidden width, V classes.
"""

import hashlib
import importlib
import inspect
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from grasp.corpus.images import decode_image
from grasp.errors import ModelError
from grasp.extras import require
from grasp.models.causal_lm import HEAD_TOLERANCE, device_of, dtype_of, load_checkpoint
from grasp.models.fitted_head import FittedHead, linear_head
from grasp.models.head import OutputHead
from grasp.settings import ClassifierSettings, ImageSettings, ModelSettings

RESAMPLING = ("nearest", "lanczos", "bilinear", "bicubic")  # in the order of PIL's numbers
FULL_BYTE = 255.0


class ImageClassifier:
    """Frozen image classifier that gives what its head reads, and the head."""

    def __init__(self, model: nn.Module, settings: ClassifierSettings, images: ImageSettings | None = None) -> None:
        self.model = model.eval().requires_grad_(False)
        self.linear = linear_head(model, settings.head)
        self.head = OutputHead(self.linear)
        self.vocab_size, self.hidden_size = self.linear.out_features, self.linear.in_features
        self.classes = settings.classes
        self.images = images or settings.images or ImageSettings()
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
        model, images, classes = _hugging_face(settings) if chosen.factory is None else _made(settings, chosen)
        if chosen.fitted_head is not None:
            fitted = FittedHead.read(Path(chosen.fitted_head))
            fitted.put(model, chosen.head)
            classes = fitted.classes
        chosen = chosen.model_copy(update={"classes": chosen.classes or classes})
        found = cls(model.to(device=device, dtype=dtype_of(settings.dtype, device)), chosen, chosen.images or images)
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
        text = json.dumps([self.images.model_dump(mode="json"), list(self.classes)])
        return "preprocessing", hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def pixels(self, encoded: Sequence[bytes]) -> Tensor:
        """Images as the model sees them, (B, 3, size, size), float32, on the CPU.

        Raises:
            ModelError: no image can be made of some bytes.
        """
        return torch.from_numpy(np.stack([preprocessed(content, self.images) for content in encoded]))

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
        size = self.images.size
        noise = np.random.default_rng(0).standard_normal((2, 3, size, size)).astype(np.float32)
        hidden_BH, own = self._run(torch.from_numpy(noise))
        ours = self.logits(hidden_BH)
        own = own.float()
        allowed = HEAD_TOLERANCE[self.dtype] * max(float(ours.std()), 1e-6)
        if own.shape != ours.shape or not float((own - ours).abs().max()) <= allowed:
            raise ModelError(
                f"model.classifier.head: `{self._name}` is not the last layer of {type(self.model).__name__}: its "
                f"output of shape {tuple(ours.shape)} is not the model's, of shape {tuple(own.shape)}, within "
                f"{allowed:.2g}; name the layer that gives the logits"
            )

    def fingerprint(self) -> str:
        """blake2b over the weights as loaded."""
        digest = hashlib.blake2b(digest_size=16)
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

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

    def _check_classes(self) -> None:
        if self.classes and len(self.classes) != self.vocab_size:
            raise ModelError(
                f"model.classifier.classes: got {len(self.classes)} names, the head `{self._name}` has "
                f"{self.vocab_size} outputs; name every class, in the order of the head"
            )


def preprocessed(encoded: bytes, settings: ImageSettings) -> NDArray[np.float32]:
    """One image as the model sees it, (3, size, size): RGB, resized, cropped at the centre, scaled, normalised.

    Raises:
        ModelError: no image can be made of the bytes.
    """
    image = decode_image(encoded)
    if image is None:
        raise ModelError("images: one that was read before can no longer be decoded; build the artifact again")
    pil = require("PIL.Image", extra="vision", feature="reading images")
    how = pil.Resampling(RESAMPLING.index(settings.interpolation))
    short = settings.resize or settings.size
    scale = short / min(image.size)
    image = image.resize((max(short, round(image.width * scale)), max(short, round(image.height * scale))), how)
    left, top = (image.width - settings.size) // 2, (image.height - settings.size) // 2
    image = image.crop((left, top, left + settings.size, top + settings.size))
    values = np.asarray(image, dtype=np.float32) / np.float32(FULL_BYTE)
    scaled = (values - np.asarray(settings.mean, np.float32)) / np.asarray(settings.std, np.float32)
    return np.ascontiguousarray(scaled.transpose(2, 0, 1))


def _made(
    settings: ModelSettings, chosen: ClassifierSettings
) -> tuple[nn.Module, ImageSettings | None, tuple[str, ...]]:
    """The module that a factory makes, with the weights of the file."""
    assert chosen.factory is not None
    factory = _factory(chosen.factory)
    try:
        model = factory(**chosen.arguments)
    except (TypeError, ValueError, AttributeError, KeyError, RuntimeError, AssertionError, OSError) as err:
        raise ModelError(
            f"model.classifier.factory: {chosen.factory} failed with {chosen.arguments}: {' '.join(str(err).split())}"
        ) from err
    if not isinstance(model, nn.Module):
        raise ModelError(f"model.classifier.factory: {chosen.factory} gave a {type(model).__name__}, no torch module")
    _load_weights(model, Path(settings.path))
    return model, None, ()


def _factory(name: str) -> Callable[..., Any]:
    """What the settings name, if it makes modules and nothing else: a settings file must not call what it likes."""
    module_name, colon, path = name.partition(":")
    where = f"model.classifier.factory: {name!r}"
    if not colon or not path:
        raise ModelError(f"{where}: expected package.module:name, e.g. torchvision.models:resnet18")
    try:
        found: Any = importlib.import_module(module_name)
        for step in path.split("."):
            found = getattr(found, step)
    except (ImportError, AttributeError) as err:
        raise ModelError(f"{where}: {err}; install the package or mend the name") from err
    if not _makes_modules(found):
        raise ModelError(
            f"{where}: expected a class of torch.nn.Module, a class method of one, or a function annotated to give one"
        )
    made: Callable[..., Any] = found
    return made


def _makes_modules(found: Any) -> bool:
    owner = found if inspect.isclass(found) else getattr(found, "__self__", None)
    if inspect.isclass(owner):
        return issubclass(owner, nn.Module)
    if not inspect.isfunction(found):
        return False
    try:
        returned = typing.get_type_hints(found).get("return")
    except (NameError, TypeError):
        return False
    return inspect.isclass(returned) and issubclass(returned, nn.Module)


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


def _hugging_face(settings: ModelSettings) -> tuple[nn.Module, ImageSettings | None, tuple[str, ...]]:
    """A checkpoint of transformers, its preprocessing, and the names of its classes."""
    from transformers import AutoModelForImageClassification  # noqa: PLC0415 - slow to import

    model = load_checkpoint(AutoModelForImageClassification, settings, "is not an image classifier")
    names: Mapping[Any, str] = model.config.id2label
    classes = tuple(names[k] for k in sorted(names, key=int))
    processor = Path(settings.path) / "preprocessor_config.json"
    return model, _preprocessing(processor) if processor.is_file() else None, classes


def _preprocessing(path: Path) -> ImageSettings:
    """What a checkpoint's own file says of its images."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        size, crop = data.get("size", {}), data.get("crop_size", {})
        resize, cut = _side(size), _side(crop) if data.get("do_center_crop") else None
        return ImageSettings(
            size=cut or resize,
            resize=max(resize, cut) if cut else None,
            interpolation=RESAMPLING[data.get("resample", 2)],
            mean=tuple(data.get("image_mean", ImageSettings().mean)),
            std=tuple(data.get("image_std", ImageSettings().std)),
        )
    except (ValueError, KeyError, IndexError, TypeError, StopIteration) as err:
        raise ModelError(
            f"{path}: cannot be read as preprocessing: {' '.join(str(err).split())}; give model.classifier.images"
        ) from err


def _side(size: Any) -> int:
    """The side that a size of transformers means."""
    if isinstance(size, int):
        return size
    return int(next(size[key] for key in ("shortest_edge", "height") if key in size))
