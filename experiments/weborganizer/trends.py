"""Relevance by label over the checkpoints of a model: several artifacts of the same corpus, oldest first.

Start with `label_trends`. Shape letters: C checkpoints, G slices, T targets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from grasp.arrays import F64, ratio
from grasp.artifact.reader import ArtifactReader
from grasp.errors import ArtifactError
from grasp.predict.predictor import UnitSelection, task_kernels
from grasp.predict.scoring_rule import ScoringProtocol
from grasp.predict.slices import LabelSlices

MEAN = ScoringProtocol(name="mean")  # negative relevance counts as it is


@dataclass(frozen=True, slots=True)
class LabelTrend:
    """Contributions of the slices of one label at every checkpoint.

    For each checkpoint and target the positive shares sum to 1 and the negative ones to -1, so that checkpoints can be
    compared although the scale of relevance changes. Source: fig:weborganizer-contribution of the paper.
    """

    label: str
    kernel: str
    checkpoints: tuple[str, ...]
    mean_CGT: F64  # mean relevance over the rows of the slice
    share_CGT: F64


def label_trends(
    artifacts: Sequence[ArtifactReader], labels: Sequence[LabelSlices], targets: Sequence[str]
) -> tuple[LabelTrend, ...]:
    """Compute the mean relevance of every slice at every checkpoint, and its share.

    Args:
        artifacts: artifacts of the checkpoints, oldest first; `labels` belong to the last.
        labels: labels of the last artifact.
        targets: names of targets that all artifacts have.

    Raises:
        ArtifactError: an artifact is of another corpus, lacks a target, or has no kernel in common with the others.
    """
    last = artifacts[-1]
    for artifact in artifacts[:-1]:
        fingerprint, expected = (checked.manifest.fingerprints.get("corpus", "none") for checked in (artifact, last))
        if fingerprint != expected:
            raise ArtifactError(
                f"{artifact.path}: was built on another corpus ({fingerprint}) than {last.path} "
                f"({expected}); expected an earlier checkpoint on the same rows"
            )
        if missing := [name for name in targets if name not in artifact.targets]:
            raise ArtifactError(
                f"{artifact.path}: has no target {', '.join(missing)}; add it with grasp build --add-target"
            )
    common = set.intersection(*(set(artifact.array_names) for artifact in artifacts))
    kernel = next((kernel for kernel in ("output_layer", "pooled") if f"relevance_{kernel}" in common), None)
    if kernel is None:
        built = {
            str(artifact.path): [name for name in artifact.array_names if name.startswith("relevance_")]
            for artifact in artifacts
        }
        raise ArtifactError(f"the artifacts have no kernel in common: {built}; build them with the same match")
    # the shortest distinct names: model directories, artifact directories, full paths, or numbered paths
    models = [Path(str(artifact.manifest.settings.get("model", {}).get("path", ""))).name for artifact in artifacts]
    paths = [artifact.path for artifact in artifacts]
    numbered = [f"{path} ({number})" for number, path in enumerate(paths, start=1)]
    candidates = models, [path.name for path in paths], [str(path) for path in paths], numbered
    names = next(candidate for candidate in candidates if len(set(candidate)) == len(candidate))
    relevance = [
        task_kernels(artifact, MEAN, UnitSelection.from_targets(artifact, targets), {kernel: 1.0})[kernel].relevance
        for artifact in artifacts
    ]
    trends = []
    for label in labels:
        mean_CGT = np.stack([row_sums.sums(label.each) for row_sums in relevance]) / label.rows_G[:, None]
        positive, negative = np.maximum(mean_CGT, 0.0), np.minimum(mean_CGT, 0.0)
        positive_total, negative_total = positive.sum(axis=1, keepdims=True), -negative.sum(axis=1, keepdims=True)
        share_CGT = ratio(positive, positive_total)
        share_CGT += ratio(negative, negative_total)
        trends.append(LabelTrend(label.label, kernel, tuple(names), mean_CGT, share_CGT))
    return tuple(trends)
