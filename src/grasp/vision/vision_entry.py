"""Interface of this subpackage, see `grasp.pipeline.modality.Vision`. Importing it does not import torch."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from grasp.settings import BuildSettings, ModelSettings
from grasp.targets.units import UnitSet
from grasp.vision.explain_image import explain_images as explain
from grasp.vision.explain_image import picture_url, row_pictures
from grasp.vision.image_units import load_image_units
from grasp.vision.images import ImageShard, ImageStore

if TYPE_CHECKING:
    from grasp.vision.classifier import ImageClassifier

__all__ = ["explain", "load_model", "open_rows", "picture_url", "read", "row_pictures"]

open_rows = ImageStore.open


def load_model(settings: ModelSettings) -> "ImageClassifier":
    """Load the classifier; see `ImageClassifier.load`."""
    from grasp.vision.classifier import ImageClassifier  # noqa: PLC0415 - brings torch

    return ImageClassifier.load(settings)


def read(
    settings: BuildSettings, model: "ImageClassifier", tokens: Path, *, replace: bool, progress: Callable[[int], None]
) -> tuple[UnitSet, ImageShard, ImageStore]:
    """Load trusted images as units, and store the images of the corpus as rows in the directory `tokens`."""
    classes, n_classes = model.classes, model.vocab_size
    unit_set, units = load_image_units(settings.targets, settings.corpus, classes, n_classes)
    store = ImageStore.write(
        tokens,
        settings.corpus,
        classes,
        n_classes,
        shard_rows=settings.shard_rows,
        replace=replace,
        progress=progress,
    )
    return unit_set, units, store
