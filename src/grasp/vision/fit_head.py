"""Fit a linear output layer (the head) to a corpus of labelled images, for a backbone that has other classes.

Start with `fit_head`. The result is a file that `model.classifier.fitted_head` names.

Shape letters: N images, H width of the head's input, V classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from grasp.corpus.labels import Label
from grasp.corpus.packing import Skipped
from grasp.errors import CorpusError, SettingsError
from grasp.progress import Progress
from grasp.settings import CorpusSettings, ModelSettings
from grasp.vision.classifier import ImageClassifier
from grasp.vision.fitted_head import FittedHead, fit_linear
from grasp.vision.images import class_index, read_images, usable_images
from grasp.vision.settings import ClassifierSettings, classifier_of

MIN_CLASSES = 2


@dataclass(frozen=True, slots=True)
class HeadFit:
    """Result of fitting a head, with its accuracy and loss on the training images."""

    classes: tuple[str, ...]
    n_images: int
    skipped: Skipped  # unusable images, by reason
    accuracy: float
    loss: float  # nats per image


def fit_head(
    model: ModelSettings,
    corpus: CorpusSettings,
    out: Path,
    *,
    decay: float = 0.1,
    progress: Progress | None = None,
) -> HeadFit:
    """Fit multinomial logistic regression to the inputs of the output layer, and write it to `out`.

    Holds the features of all images in memory: 4 H bytes per image.

    Args:
        model: settings of the backbone; `model.classifier.head` names the output layer.
        corpus: settings of the labelled images.
        out: file to write, .safetensors.
        decay: weight decay in units of the mean variance of a feature; larger values fit noisy labels less.
        progress: receives the number of images.
    Raises:
        GraspError: the model or the corpus cannot be used, or has fewer than two classes.
    """
    if model.reader is None:
        raise SettingsError("fit-head: model.classifier is missing; name at least model.classifier.head")
    classifier = classifier_of(model)
    if classifier.fitted_head is not None:
        raise SettingsError("model.classifier.fitted_head: not supported by fit-head, which fits a new head; remove it")
    # The backbone still has its old head, whose number of outputs may differ from the number of class names.
    without_classes = classifier.model_copy(update={"classes": ()})
    backbone = ImageClassifier.load(model.model_copy(update={"classifier": without_classes}))
    hidden_NH, values, skipped = _features(backbone, classifier, corpus, progress or Progress())
    classes = classifier.classes or _classes(values)
    if len(classes) < MIN_CLASSES:
        raise CorpusError(f"{corpus.path}: its images have {len(classes)} class(es), expected at least {MIN_CLASSES}")
    class_N = np.array([class_index(value, classes, len(classes), corpus.path) for value in values])
    mean_variance = float(hidden_NH.var(axis=0).mean()) or 1.0
    weight_VH, bias_V = fit_linear(hidden_NH, class_N, len(classes), decay=decay * mean_variance)
    FittedHead(torch.from_numpy(weight_VH), torch.from_numpy(bias_V), classes).write(out)
    logits_NV = hidden_NH @ weight_VH.T + bias_V
    return HeadFit(
        classes=classes,
        n_images=len(class_N),
        skipped=skipped,
        accuracy=float((logits_NV.argmax(axis=1) == class_N).mean()),
        # mean cross-entropy: log of the sum of exp(logits), minus the logit of the label
        loss=float(np.mean(np.logaddexp.reduce(logits_NV, axis=1) - logits_NV[np.arange(len(class_N)), class_N])),
    )


def _features(
    model: ImageClassifier, classifier: ClassifierSettings, corpus: CorpusSettings, progress: Progress
) -> tuple[NDArray[np.float32], list[Label], Skipped]:
    """Return the inputs of the output layer for usable images, their classes as given, and the unusable images."""
    parts: list[NDArray[np.float32]] = []
    values: list[Label] = []
    log = Skipped()
    progress.stage("features", rows=None, tokens=None)
    records = (record for record, _ in usable_images(read_images(corpus, classifier), log))
    while group := list(islice(records, model.batch_images)):
        pixels = model.pixels([record.encoded for record in group if record.encoded is not None])
        parts.append(model.hidden(pixels).float().cpu().numpy())
        values += [record.class_value for record in group]
        progress.advance(len(group), len(group))
    if not parts:
        counts = ", ".join(f"{count} {reason}" for reason, count in log.counts.items())
        raise CorpusError(
            f"{corpus.path}: none of its {sum(log.counts.values())} images can be used "
            f"({counts or 'empty'}), expected at least one"
        )
    return np.concatenate(parts), values, log


def _classes(values: Sequence[Label]) -> tuple[str, ...]:
    """Return the class names of labels: sorted names, or for integer labels the names 0 to the largest integer."""
    numbers = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    if len(numbers) == len(values):
        if min(numbers) < 0:
            raise CorpusError(f"classes: got the number {min(numbers)}, expected numbers from 0 or names")
        return tuple(str(k) for k in range(max(numbers) + 1))
    names: set[Any] = set(values)
    other_types = sorted({type(name).__name__ for name in names if not isinstance(name, str)})
    if other_types:
        raise CorpusError(
            f"classes: got values of type {', '.join(other_types)}, expected all names or all numbers from 0"
        )
    return tuple(sorted(names))
