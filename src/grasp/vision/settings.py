"""Settings of an image classifier, `model.classifier`."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from grasp.settings import ModelSettings, ReaderSettings, Settings


class ImageSettings(Settings):
    """Preprocessing of images for a classifier: RGB, resized, cropped, scaled to [0, 1], normalised."""

    size: int = Field(224, ge=1, description="Side of the square input image, in pixels.")
    resize: int | None = Field(
        None, ge=1, description="Length of the shorter side before the centre crop, in pixels. null: `size`."
    )
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] = Field(
        "bilinear", description="Interpolation used for resizing."
    )
    mean: tuple[float, float, float] = Field((0.485, 0.456, 0.406), description="Mean of each channel in [0, 1].")
    std: tuple[float, float, float] = Field(
        (0.229, 0.224, 0.225), description="Standard deviation of each channel in [0, 1]."
    )

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.resize is not None and self.resize < self.size:
            raise ValueError(f"resize: got {self.resize}, expected at least size, {self.size}")
        if min(self.std) <= 0:
            raise ValueError(f"std: got {self.std}, expected positive numbers")
        return self


class ClassifierSettings(ReaderSettings):
    """An image classifier as the reference model: any torch module with a named linear output layer."""

    # tau: selected on development noise seeds (experiments/vision/tau.json), on 1,000 images of up to 1,280 features:
    # with that few rows per dimension, whitening mostly adds noise. hidden_width: heads up to this width have an exact
    # sketch.
    features: ClassVar[Mapping[str, Any]] = {"tau": 100.0, "hidden_width": 2048}
    code: ClassVar[tuple[str, ...]] = ("factory",)
    inputs: ClassVar[Mapping[str, str]] = {"fitted_head": "the output layer"}

    head: str = Field(description="Dotted name of the linear output layer, e.g. fc, classifier, _fc.")
    factory: str | None = Field(
        None,
        description="Callable that creates the module, as package.module:name (installed, or in the current directory) "
        "or FILE.py:name: a subclass of torch.nn.Module, a class method of one, or a function annotated to return one. "
        "Its code is executed. model.path is then a file of weights. null: model.path is a Hugging Face checkpoint.",
    )
    arguments: dict[str, Any] = Field({}, description="Keyword arguments of the factory.")
    fitted_head: str | None = Field(
        None,
        description="Safetensors file of an output layer that replaces the model's: `weight` (classes x inputs), "
        "`bias`, and the JSON list `classes` in its metadata.",
    )
    classes: tuple[str, ...] = Field(
        (),
        description="Names of the classes, in the order of the output layer. Empty: those of the checkpoint or of the "
        "fitted head.",
    )
    images: ImageSettings | None = Field(
        None,
        description="Preprocessing. null: the image processor of a checkpoint, the data config of a timm module, or "
        "else that of ImageNet at 224 pixels.",
    )
    batch_images: int = Field(32, ge=1, description="Images in one forward pass.")
    image_column: str = Field("image", description="Column of encoded images, in the corpus and in targets.")
    class_column: str = Field("label", description="Column of the classes of images, as numbers from 0 or names.")


def classifier_of(model: ModelSettings) -> ClassifierSettings:
    """Return the settings of the classifier, which those of a model have."""
    settings = (model.model_extra or {})[str(model.reader)]
    assert isinstance(settings, ClassifierSettings)
    return settings
