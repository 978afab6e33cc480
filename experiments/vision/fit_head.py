"""Fit a linear output layer (the head) to a corpus of labelled images, for a backbone that has other classes.

    python -m experiments.vision.fit_head --settings images.yaml --corpus train.parquet --out head.safetensors

The result is a file that `model.classifier.fitted_head` names. Shape letters: N images, H width of the head's input, V
classes.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn

from experiments.one_line_errors import in_one_line
from grasp.corpus.labels import Label
from grasp.corpus.packing import Skipped
from grasp.errors import CorpusError, SettingsError
from grasp.files import atomic_path
from grasp.settings import CorpusSettings, ModelSettings
from grasp.vision.classifier import ImageClassifier
from grasp.vision.images import class_index, read_images, usable_images
from grasp.vision.settings import ClassifierSettings, classifier_of
from grasp.yaml_files import read_yaml, validated

MIN_CLASSES = 2


@dataclass(frozen=True, slots=True)
class HeadFit:
    """Result of fitting a head, with its accuracy and loss on the training images."""

    classes: tuple[str, ...]
    n_images: int
    skipped: Skipped  # unusable images, by reason
    accuracy: float
    loss: float  # nats per image


def fit_head(model: ModelSettings, corpus: CorpusSettings, out: Path, *, decay: float = 0.1) -> HeadFit:
    """Fit multinomial logistic regression to the inputs of the output layer, and write it to `out`.

    Holds the features of all images in memory: 4 H bytes per image.

    Args:
        model: settings of the backbone; `model.classifier.head` names the output layer.
        corpus: settings of the labelled images.
        out: file to write, .safetensors.
        decay: weight decay in units of the mean variance of a feature; larger values fit noisy labels less.
    Raises:
        GraspError: the model or the corpus cannot be used, or has fewer than two classes.
    """
    if model.reader is None:
        raise SettingsError("model.classifier: missing; name at least model.classifier.head")
    classifier = classifier_of(model)
    if classifier.fitted_head is not None:
        raise SettingsError("model.classifier.fitted_head: a new head is fitted here; remove it")
    # The backbone still has its old head, whose number of outputs may differ from the number of class names.
    without_classes = classifier.model_copy(update={"classes": ()})
    backbone = ImageClassifier.load(model.model_copy(update={"classifier": without_classes}))
    hidden_NH, values, skipped = _features(backbone, classifier, corpus)
    classes = classifier.classes or _classes(values)
    if len(classes) < MIN_CLASSES:
        raise CorpusError(f"{corpus.path}: its images have {len(classes)} class(es), expected at least {MIN_CLASSES}")
    class_N = np.array([class_index(value, classes, len(classes), corpus.path) for value in values])
    mean_variance = float(hidden_NH.var(axis=0).mean()) or 1.0
    weight_VH, bias_V = fit_linear(hidden_NH, class_N, len(classes), decay=decay * mean_variance)
    tensors = {"weight": torch.from_numpy(weight_VH).float(), "bias": torch.from_numpy(bias_V).float()}
    with atomic_path(out) as part:
        save_file(tensors, part, metadata={"classes": json.dumps(classes)})
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
    model: ImageClassifier, classifier: ClassifierSettings, corpus: CorpusSettings
) -> tuple[NDArray[np.float32], list[Label], Skipped]:
    """Return the inputs of the output layer for usable images, their classes as given, and the unusable images."""
    parts: list[NDArray[np.float32]] = []
    values: list[Label] = []
    log = Skipped()
    records = (record for record, _ in usable_images(read_images(corpus, classifier), log))
    while group := list(islice(records, model.batch_images)):
        pixels = model.pixels([record.encoded for record in group if record.encoded is not None])
        parts.append(model.hidden(pixels).float().cpu().numpy())
        values += [record.class_value for record in group]
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


def fit_linear(
    hidden_NH: NDArray[np.floating[Any]],
    class_N: NDArray[np.integer[Any]],
    n_classes: int,
    *,
    decay: float,
    weight_N: NDArray[np.floating[Any]] | None = None,
    steps: int = 200,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Fit multinomial logistic regression; return weights (V, H) and bias (V,), float64.

    Minimises the weighted mean loss plus decay / 2 times the squared weights (not the bias) with L-BFGS from zero. The
    objective is convex, so the result depends only on the data.

    Args:
        hidden_NH: features of the examples.
        class_N: class of each example, 0 to n_classes - 1.
        n_classes: number of classes.
        decay: strength of the penalty.
        weight_N: weights of the examples. Default: equal weights.
        steps: maximum number of iterations.
    """
    hidden = torch.from_numpy(np.asarray(hidden_NH, dtype=np.float64))
    label = torch.from_numpy(np.asarray(class_N, dtype=np.int64))
    share = np.ones(len(hidden)) if weight_N is None else np.asarray(weight_N, dtype=np.float64)
    share_N = torch.from_numpy(share / share.sum())
    weight = torch.zeros(n_classes, hidden.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(n_classes, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=steps, tolerance_grad=1e-7, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def objective() -> Tensor:
        optimizer.zero_grad()
        losses = nn.functional.cross_entropy(hidden @ weight.T + bias, label, reduction="none")
        loss = (share_N * losses).sum() + 0.5 * decay * weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(objective)  # type: ignore[no-untyped-call]
    return weight.detach().numpy(), bias.detach().numpy()


@in_one_line()
def main(arguments: list[str] | None = None) -> None:
    """Fit and write; print what was fitted and what was left out."""
    parser = argparse.ArgumentParser(prog="python -m experiments.vision.fit_head", description=__doc__.splitlines()[0])
    parser.add_argument("--settings", type=Path, required=True, help="YAML file of settings, as of `grasp build`.")
    parser.add_argument("--corpus", required=True, help="Labelled images, as of `grasp build`.")
    parser.add_argument("--out", type=Path, required=True, help="File of the fitted head, .safetensors.")
    args = parser.parse_args(arguments)
    data = read_yaml(args.settings)
    model = validated(ModelSettings, data.get("model", {}), "model")
    corpus = validated(CorpusSettings, data.get("corpus", {}) | {"path": args.corpus}, "corpus")
    result = fit_head(model, corpus, args.out)
    print(
        f"{args.out}: {len(result.classes)} classes, fitted to {result.n_images:,} images: accuracy on them "
        f"{result.accuracy:.1%}, loss {result.loss:.3f} nats"
    )
    for reason, count in result.skipped.counts.items():
        print(f"left out: {count:,} {reason}")


if __name__ == "__main__":
    main()
