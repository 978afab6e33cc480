"""The reference model of a build, whatever kind its settings name."""

from grasp.models.causal_lm import ReferenceModel
from grasp.models.classifier import ImageClassifier
from grasp.settings import ModelSettings

Reference = ReferenceModel | ImageClassifier


def load_reference(settings: ModelSettings) -> Reference:
    """A causal LM, or an image classifier where the settings have one.

    Raises:
        ModelError: as the loader of its kind.
    """
    return ReferenceModel.load(settings) if settings.classifier is None else ImageClassifier.load(settings)
