"""An image classifier as the reference model of a build: it returns what the kernels need of each image.

A kernel compares training images (rows) with trusted images (units) by the gradient of the loss in the classifier's
last linear layer, the head. That gradient is an outer product of two vectors: the input h of the head, and the residual
xi = softmax(logits) - onehot(class). A text has such a pair at every position that predicts a token; an image has one
pair, so it counts as one position, and the classes take the place of the vocabulary.

Supports any torch module whose output is that of a named linear layer: of torchvision, timm, Hugging Face or user code.
Start with `ImageClassifier.load`.

Shape letters: B images of a batch, C channels, P positions (one per image), H width of the head's input, V classes.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Self

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from grasp.errors import ModelError
from grasp.extras import require
from grasp.models.causal_lm import weights_fingerprint
from grasp.models.checkpoint import device_of, dtype_of, load_checkpoint
from grasp.models.forward_pass import BatchFeatures, Pass
from grasp.models.head import TOLERANCE, OutputHead
from grasp.models.residuals import head_residual
from grasp.settings import ModelSettings
from grasp.vision.factory import make_module, user_code
from grasp.vision.fitted_head import FittedHead, linear_head
from grasp.vision.images import ImageRows, decode_image
from grasp.vision.preprocessing import HuggingFaceProcessor, Preprocessing, ResizeAndCrop, default_preprocessing
from grasp.vision.settings import ClassifierSettings, classifier_of

PROBE_IMAGE_SIZE = (96, 160)  # height and width of the random images with which `check_head` runs the module
# Exceptions that a module raises in its forward pass if the images have a shape that it does not accept.
FORWARD_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError, AssertionError)


class ImageClassifier:
    """Frozen image classifier that returns the input of its linear head and the residual for each image.

    Has the attributes and methods of `grasp.models.causal_lm.ReferenceModel` that a build uses: `vocab_size` is the
    number of classes, and `passes` yields batches of rows.

    Args:
        model: the module; it is set to eval mode and its parameters are frozen.
        settings: name of the head, names of the classes, and images per batch.
        preprocessing: turns a decoded image into the module's input.
    """

    def __init__(self, model: nn.Module, settings: ClassifierSettings, preprocessing: Preprocessing) -> None:
        self.model = model.eval().requires_grad_(False)
        self.linear = linear_head(model, settings.head)
        self.head = OutputHead(self.linear)
        self.vocab_size, self.hidden_size = self.linear.out_features, self.linear.in_features
        self.classes = settings.classes
        self.preprocessing = preprocessing
        self.batch_images = settings.batch_images
        self._head_name = settings.head
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype

    @classmethod
    def load(cls, settings: ModelSettings) -> Self:
        """Create the module, load its weights, install a fitted head, and check that head(hidden) equals its logits.

        Raises:
            ModelError: no such model; the factory returns no module; the weights do not fit; the head does not exist,
                is not linear, or is not the last layer; the number of class names differs from the head's outputs.
        """
        classifier_settings = classifier_of(settings)
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        device = device_of(settings.device)
        images, classes = classifier_settings.images, tuple[str, ...]()
        preprocessing: Preprocessing | None = None if images is None else ResizeAndCrop(images)
        if classifier_settings.factory is not None:
            model = make_module(classifier_settings)
            _load_weights(model, Path(settings.path))
            preprocessing = preprocessing or default_preprocessing(model)
        else:
            from transformers import AutoModelForImageClassification  # noqa: PLC0415 - slow to import

            model = load_checkpoint(AutoModelForImageClassification, settings, "is not an image classifier")
            names: Mapping[Any, str] = model.config.id2label
            classes = tuple(names[k] for k in sorted(names, key=int))
            preprocessing = preprocessing or HuggingFaceProcessor.from_settings(settings)
        if classifier_settings.fitted_head is not None:
            fitted_head = FittedHead.read(Path(classifier_settings.fitted_head))
            fitted_head.install(model, classifier_settings.head)
            classes = fitted_head.classes
        classifier_settings = classifier_settings.model_copy(update={"classes": classifier_settings.classes or classes})
        classifier = cls(
            model.to(device=device, dtype=dtype_of(settings.dtype, device)),
            classifier_settings,
            preprocessing,
        )
        if classifier.classes and len(classifier.classes) != classifier.vocab_size:
            raise ModelError(
                f"model.classifier.classes: got {len(classifier.classes)} names, but the head "
                f"`{classifier_settings.head}` has {classifier.vocab_size} outputs; name every class, in the order of "
                "the outputs"
            )
        if settings.check:
            classifier.check_head()
        return classifier

    @property
    def details(self) -> dict[str, Any]:
        """Further fields of the artifact's manifest."""
        return {"classes": list(self.classes)}

    @property
    def batching(self) -> dict[str, Any]:
        """Settings of the forward pass that may change results by rounding; recorded in the artifact."""
        return {"batch_images": self.batch_images}

    @property
    def reader(self) -> tuple[str, str]:
        """Name and hash of the step that turns an image into the model's input; a causal LM has its tokenizer here."""
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

    def passes(self, rows: ImageRows, top_k: int) -> Iterator[Pass]:
        """Yield batches of images: their indices in `rows`, (B,), and their features; see `features`."""
        for start in range(0, len(rows), self.batch_images):
            index = np.arange(start, min(start + self.batch_images, len(rows)))
            pixels_BCHW = self.pixels([rows.encoded[i] for i in index])
            yield index, self.features(pixels_BCHW, torch.from_numpy(rows.class_N[index]), top_k)

    @torch.inference_mode()
    def features(self, pixels_BCHW: Tensor, class_B: Tensor, top_k: int) -> BatchFeatures:
        """Compute the features of a batch of images, each of which is one position.

        Args:
            pixels_BCHW: preprocessed images, (B, C, height, width).
            class_B: label of each image.
            top_k: number of the largest probabilities that are kept in a residual.
        Source: eq:token-residual (a label of the paper, see docs/paper_map.md), with classes instead of tokens.
        """
        hidden_BH = self.hidden(pixels_BCHW)
        class_B = class_B.to(self.device)
        return BatchFeatures(
            hidden_PH=hidden_BH.float(),
            residual=head_residual(self.head, hidden_BH, class_B, top_k, self.vocab_size),
            row_P=torch.arange(len(hidden_BH), device=self.device),
            # An image has no input token. Only the `embedding` kernel, which is for language models, reads this field.
            input_P=torch.zeros_like(class_B),
        )

    @torch.inference_mode()
    def hidden(self, pixels_BCHW: Tensor) -> Tensor:
        """Return the head's input for each image, (B, H), model dtype."""
        hidden_BH, _ = self._run(pixels_BCHW)
        return hidden_BH

    @torch.inference_mode()
    def logits(self, hidden_PH: Tensor) -> Tensor:
        """Return the logits that the head computes from its inputs, (P, V), float32."""
        return self.head.link(self.head.linear_logits(hidden_PH.to(self.dtype)).float())

    @torch.inference_mode()
    def check_head(self) -> None:
        """Compare head(hidden) with the output of the module on two random images.

        They must be equal up to rounding: otherwise something follows the head, and h and xi do not give the gradient.

        Raises:
            ModelError: the head is not called exactly once with one vector per image, or is not the last layer.
        """
        pil = require("PIL.Image", extra="vision", feature="reading images")
        noise = np.random.default_rng(0).integers(0, 256, size=(2, *PROBE_IMAGE_SIZE, 3), dtype=np.uint8)
        pixels_BCHW = self._preprocess([pil.fromarray(pixels) for pixels in noise])
        try:
            hidden_BH, model_logits = self._run(pixels_BCHW)
        except FORWARD_ERRORS as err:
            raise ModelError(
                f"{type(self.model).__name__} failed on images of shape {tuple(pixels_BCHW.shape[1:])}: "
                f"{' '.join(str(err).split())[:300]}; set model.classifier.images to the preprocessing of its training"
            ) from err
        head_logits = self.logits(hidden_BH)
        model_logits = model_logits.float()
        tolerance = TOLERANCE[self.dtype] * max(float(head_logits.std()), 1e-6)
        # `not <=` instead of `>`: a NaN compares false, and must count as a difference.
        if model_logits.shape != head_logits.shape or not float((model_logits - head_logits).abs().max()) <= tolerance:
            raise ModelError(
                f"model.classifier.head: `{self._head_name}` is not the last layer of {type(self.model).__name__}: its "
                f"output, of shape {tuple(head_logits.shape)}, differs from that of the model, of shape "
                f"{tuple(model_logits.shape)}, by more than {tolerance:.2g}; name the layer that computes the logits"
            )

    def fingerprint(self) -> str:
        """Return a blake2b hash of the loaded weights, and of the source code of a user-defined module."""
        return weights_fingerprint(self.model, user_code(self.model))

    def _run(self, pixels_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the head, (B, H), recorded by a hook, and the output of the module, (B, V)."""
        head_inputs: list[Tensor] = []
        hook = self.linear.register_forward_pre_hook(lambda _, arguments: head_inputs.append(arguments[0]))
        try:
            output = self.model(pixels_BCHW.to(device=self.device, dtype=self.dtype))
        finally:
            hook.remove()
        if len(head_inputs) != 1 or head_inputs[0].shape != (len(pixels_BCHW), self.hidden_size):
            shapes = [tuple(tensor.shape) for tensor in head_inputs]
            raise ModelError(
                f"model.classifier.head: `{self._head_name}` was called {len(head_inputs)} times, with inputs of shape "
                f"{shapes}; expected once, with one vector of width {self.hidden_size} per image"
            )
        # Modules of Hugging Face return a record with the field `logits`.
        return head_inputs[0], output if isinstance(output, Tensor) else output.logits

    def _preprocess(self, images: Sequence[Any]) -> Tensor:
        """Preprocess decoded images and stack them to a batch, (B, C, height, width), float32."""
        arrays = [self.preprocessing(image) for image in images]
        shapes = {array.shape for array in arrays}
        if len(shapes) > 1:
            raise ModelError(
                f"preprocessing: images of one batch have shapes {', '.join(map(str, sorted(shapes)))}, expected equal "
                "ones; set model.classifier.images with a size"
            )
        return torch.from_numpy(np.stack(arrays))


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
    # Training scripts often save the state dict next to the optimizer, under the key `state_dict`.
    if isinstance(weights, Mapping) and isinstance(weights.get("state_dict"), Mapping):
        weights = weights["state_dict"]
    try:
        model.load_state_dict(weights)
    except (RuntimeError, TypeError, AttributeError) as err:
        raise ModelError(
            f"model.path: `{path}` does not fit {type(model).__name__}: {' '.join(str(err).split())[:300]}"
        ) from err
