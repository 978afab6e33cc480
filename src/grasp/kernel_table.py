"""The table of kernels: which a build computes, and with which weights predictions combine them.

Both depend on the training that is predicted: a *new model*, trained from scratch on the corpus, or *further training*
of an existing one. Evidence: experiments/lds_main, experiments/finetune, experiments/replay.

Gradients describe a model that hardly moves. Beside `gradient` the other kernels of further training therefore have the
weight s / (s + WEIGHT_SCALE). Here s, the sum of the learning rates, is how far Adam can move a weight, and
WEIGHT_SCALE the size that weights have at first: after a short training it is near 0, after a long one near 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

_NEW = ("output_layer", "embedding", "knn")
_FURTHER = ("output_layer", "embedding", "gradient")

# Kernels, by the kind of training (None: models of readers); their weights are in `BuiltRule.of`.
KERNELS: dict[str | None, tuple[str, ...]] = {"new": _NEW, "further": _FURTHER, None: ("output_layer",)}
WEIGHT_SCALE = 0.02  # standard deviation of the initial weights of common models
SKETCHES = ("hidden_sketch", "residual_sketch")  # computed by every build, for redundancy, maps and intervals

REPLAY = "replay"  # kernel whose relevance is of whole targets: the derivative of a replayed training
REPLAY_WEIGHT = 4.0  # its weight for further training
NEW_MODEL_REPLAY_WEIGHT = 1.0  # for a new model, chosen on cc-topic


@dataclass(frozen=True, slots=True)
class BuiltRule:
    """How predictions combine the kernels of an artifact (`match: auto`); a build records it in the manifest.

    Attributes:
        weights: weight of each kernel.
        for_new_model: whether a new model is predicted, which knn is computed for only.
    """

    weights: dict[str, float]
    for_new_model: bool

    @classmethod
    def of(cls, kernels: Sequence[str], learning_rate_sum: float = 0.0) -> Self:
        """Return the rule of an artifact with these kernels: those of the table, as far as they exist.

        All weights are 1, but for s / (s + WEIGHT_SCALE) beside `gradient`, if it is above 0. `predict.scoring_rule`
        reads the rule and adds the weight of a replay.

        Args:
            kernels: kernels that the artifact has.
            learning_rate_sum: s above, of the training that `gradient` is of; 0 if output layer and embedding are not
                trained, as by an adapter.
        """
        weights = dict.fromkeys(kernels, 1.0)
        if "output_layer" in kernels:
            row = _FURTHER if "gradient" in kernels else _NEW
            moved = round(learning_rate_sum / (learning_rate_sum + WEIGHT_SCALE), 3) if row is _FURTHER else 1.0
            weights = {name: w for name in row if name in kernels and (w := 1.0 if name == "gradient" else moved)}
        return cls(weights, "knn" in kernels and "gradient" not in kernels)

    def with_replay(self, *, estimate: bool) -> dict[str, float]:
        """Return the weights for targets with a replay; for a new model, an estimate for other questions has none."""
        if self.for_new_model and estimate:
            return self.weights
        return self.weights | {REPLAY: NEW_MODEL_REPLAY_WEIGHT if self.for_new_model else REPLAY_WEIGHT}
