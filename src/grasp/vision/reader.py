"""The reader of labelled images, an entry point of `grasp.readers`. Importing it does not import torch."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from grasp.settings import BuildSettings, ModelSettings
from grasp.targets.units import UnitSet
from grasp.vision.image_units import load_image_units
from grasp.vision.images import ImageRows, ImageStore
from grasp.vision.settings import ClassifierSettings, classifier_of

if TYPE_CHECKING:
    from grasp.vision.classifier import ImageClassifier


class ImageReader:
    """Reads images for a classifier; see `grasp.readers.Reader`."""

    settings = ClassifierSettings
    rows = ImageStore

    def load_model(self, settings: ModelSettings) -> "ImageClassifier":
        """Load the classifier; see `ImageClassifier.load`."""
        from grasp.vision.classifier import ImageClassifier  # noqa: PLC0415 - brings torch

        return ImageClassifier.load(settings)

    def read(
        self,
        settings: BuildSettings,
        model: "ImageClassifier",
        tokens: Path,
        *,
        replace: bool,
        progress: Callable[[int], None],
    ) -> tuple[UnitSet, ImageRows, ImageStore]:
        """Load trusted images as units, and store the images of the corpus as rows in the directory `tokens`."""
        classifier = classifier_of(settings.model).model_copy(update={"classes": model.classes})
        unit_set, units = load_image_units(settings.targets, settings.corpus, classifier, model.vocab_size)
        store = ImageStore.write_images(
            tokens,
            settings.corpus,
            classifier,
            model.vocab_size,
            shard_rows=settings.shard_rows,
            replace=replace,
            progress=progress,
        )
        return unit_set, units, store


images = ImageReader()
