"""The table of kernels: which a build computes, and with which weights predictions combine them.

Both depend on the training that is predicted: a *new model*, trained from scratch on the corpus, or *further training*
of an existing one. Evidence: experiments/lds_main, experiments/finetune, experiments/replay.
"""

from collections.abc import Sequence

_NEW = {"output_layer": 1.0, "embedding": 1.0, "knn": 1.0}
_BACKWARD = {"output_layer": 0.25, "embedding": 0.25, "gradient": 1.0}
_FORWARD = {"output_layer": 1.0, "embedding": 1.0, "hidden_bias": 1.0, "hidden_linear": 1.0}

# Weights of the kernels, by rule and kind of training (None: models of readers).
WEIGHTS: dict[tuple[str, str | None], dict[str, float]] = {
    ("default", "new"): _NEW,
    ("forward", "new"): _NEW,
    ("default", "further"): _BACKWARD,
    ("forward", "further"): _FORWARD,
    ("default", None): {"output_layer": 1.0},
    ("forward", None): {"output_layer": 1.0},
}
SKETCHES = ("hidden_sketch", "residual_sketch")  # computed by every build, for redundancy, maps and intervals

REPLAY = "replay"  # kernel whose relevance is of whole targets: the derivative of a replayed training
REPLAY_WEIGHT = 4.0  # its weight for further training
NEW_MODEL_REPLAY_WEIGHT = 1.0  # for a new model, chosen on cc-topic


def is_new_model(kernels: Sequence[str]) -> bool:
    """Return whether an artifact with these kernels was built for a new model: knn is computed for new models only."""
    return "knn" in kernels and "gradient" not in kernels


def auto_weights(kernels: Sequence[str], *, estimate: bool) -> dict[str, float]:
    """Return the weights of `match: auto` for an artifact with these kernels.

    They are those of the table, as far as the kernels exist; without output_layer, which another rule built, 1 each.
    Targets with a replay count it too; for a new model not if the protocol has `task: estimate`.
    """
    if "output_layer" not in kernels:
        weights = {kernel: 1.0 for kernel in kernels if kernel != REPLAY}
    else:
        row = _BACKWARD if "gradient" in kernels else _NEW if "knn" in kernels else _FORWARD
        weights = {kernel: weight for kernel, weight in row.items() if kernel in kernels}
    if REPLAY in kernels and not is_new_model(kernels):
        weights[REPLAY] = REPLAY_WEIGHT
    elif REPLAY in kernels and not estimate:
        weights[REPLAY] = NEW_MODEL_REPLAY_WEIGHT
    return weights
