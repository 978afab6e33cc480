"""Relevance by label over checkpoints of one model: several artifacts of one corpus, oldest first.

Shape letters: C checkpoints, G slices, T targets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from grasp.arrays import F64, ratio
from grasp.artifact.reader import ArtifactReader
from grasp.errors import ArtifactError
from grasp.predict.predictor import KernelRelevance, UnitSelection
from grasp.predict.slices import LabelSlices


@dataclass(frozen=True, slots=True)
class LabelTrend:
    """What the slices of one label contribute, checkpoint by checkpoint.

    Within each checkpoint and target the positive means add up to 1, and so do the negative ones (to -1): relative
    preferences, whatever the size of the signal. Source: fig:weborganizer-contribution.
    """

    label: str
    kernel: str
    checkpoints: tuple[str, ...]
    mean_CGT: F64  # mean relevance over the rows of the slice
    share_CGT: F64


def label_trends(
    artifacts: Sequence[ArtifactReader], labels: Sequence[LabelSlices], targets: Sequence[str]
) -> tuple[LabelTrend, ...]:
    """Mean relevance of every slice at every checkpoint, and its share.

    Args:
        artifacts: oldest first, the last one being that of `labels`.
    """
    last = artifacts[-1]
    for artifact in artifacts[:-1]:
        own, expected = (one.manifest.fingerprints.get("corpus", "none") for one in (artifact, last))
        if own != expected:
            raise ArtifactError(
                f"--previous {artifact.path}: was built on another corpus ({own}) than {last.path} ({expected}); "
                "expected an earlier checkpoint on the same rows"
            )
        if missing := [name for name in targets if name not in artifact.targets]:
            raise ArtifactError(
                f"--previous {artifact.path}: has no target {', '.join(missing)}; add it with grasp build "
                "--add-target, or name the common ones with --targets"
            )
    in_common = set.intersection(*(set(one.array_names) for one in artifacts))
    kernel = next((kernel for kernel in ("output_layer", "pooled") if f"relevance_{kernel}" in in_common), None)
    if kernel is None:
        built = {str(one.path): [n for n in one.array_names if n.startswith("relevance_")] for one in artifacts}
        raise ArtifactError(
            f"--previous: the artifacts have no kernel in common: {built}; build them with the same match"
        )
    # names that tell the artifacts apart: those of their models' directories, else their own paths
    models = [Path(str(one.manifest.settings.get("model", {}).get("path", ""))).name for one in artifacts]
    paths = [one.path for one in artifacts]
    numbered = [f"{path} ({place})" for place, path in enumerate(paths, start=1)]
    choices = models, [path.name for path in paths], [str(path) for path in paths], numbered
    names = next(choice for choice in choices if len(set(choice)) == len(choice))
    relevance = [
        KernelRelevance.for_tasks(one, kernel, UnitSelection.from_targets(one, targets), 1.0, 1.0).held
        for one in artifacts
    ]
    trends = []
    for label in labels:
        mean_CGT = np.stack([held.sums(label.each) for held in relevance]) / label.rows_G[:, None]
        positive, negative = np.maximum(mean_CGT, 0.0), np.minimum(mean_CGT, 0.0)
        up, down = positive.sum(axis=1, keepdims=True), -negative.sum(axis=1, keepdims=True)
        share_CGT = ratio(positive, up)
        share_CGT += ratio(negative, down)
        trends.append(LabelTrend(label.label, kernel, tuple(names), mean_CGT, share_CGT))
    return tuple(trends)
