"""The built-in scoring protocol, and the development runs that it was selected on.

`resolve_protocol` returns the protocol of a command. Without a protocol of the user it decides by this table, whose
first matching line counts:

    artifact                           predictions                                protocol
    built with a registered rule (*)   all                                        `built_in` of that rule
    for further training               all                                        DEFAULT_PROTOCOL
    for a new model                    compared with losses on known questions    DEFAULT_PROTOCOL
    for a new model, with a replay     of subsets                                 DEFAULT_PROTOCOL
    for a new model                    all others                                 TASK_PROTOCOL

(*) and with the arrays that its protocol reads; other kernels may have been requested instead. Packages register rules
by entry points, see `scoring_rule.RegisteredProtocol`.

The *known questions* are those of the targets in the artifact. DEFAULT_PROTOCOL scores a row by its mean relevance to
them; TASK_PROTOCOL by an estimate of its mean relevance to all questions of the task (`task: estimate`). Runs are
evaluated on the known questions, so comparisons with runs use the mean. A replay predicts subsets better, while the
other kernels select rows better, and TASK_PROTOCOL does not use the replay of a new model.
"""

from pathlib import Path

from grasp.artifact.reader import ArtifactReader
from grasp.entry_points import entries
from grasp.kernel_table import REPLAY
from grasp.predict.scoring_rule import (
    GROUP,
    ScoringProtocol,
    load_protocol,
    registered_protocol,
)

# Development runs that the built-in protocol was selected on: (environment, fingerprint of its runs) and targets. From
# `documents` on they come from experiments/finetune, where a pretrained model is fine-tuned.
_SELECTED_ON = {
    ("cc-topic", "0f2f202d19245c847448c176fd1067de"): ("sciq", "openbookqa", "sciq@all", "openbookqa@all"),
    ("documents", "21d5f717f4b5db332a0befbf51401c70"): ("sciq", "arc_easy", "hellaswag", "instructions"),
    ("lengths", "6459f96358d740bcaf5c6fb5d18c404d"): ("sciq", "arc_easy", "hellaswag", "instructions"),
    ("contrasts", "6ce5051a10f18b4f1afbebe3fc47b880"): ("python", "c", "sums", "trivia"),
    ("small-12", "309d2e26f61496bfb64e2568573f7976"): ("sciq", "arc_easy", "hellaswag", "openbookqa"),
    ("small-48", "e9e3bac5b97679ef2deaeda8d5ba4bf6"): ("sciq", "arc_easy", "hellaswag", "openbookqa"),
    ("small-192", "e333a45edf07148e84a9b81a6e2781e1"): ("sciq", "arc_easy", "hellaswag", "openbookqa"),
    ("small-48-slow", "427d51675cf31988c10c5f26eaae01da"): ("sciq", "arc_easy", "hellaswag", "openbookqa"),
}

# Selected by the highest lower confidence bound, out of the additive protocols of
# experiments/lds_main/additive.yaml and the kernels of experiments/finetune; default.provenance.json has the bounds.
# The kernels combined with output_layer and embedding depend on the training: knn for a new model; gradient, with a
# quarter each of output_layer and embedding, for further training (experiments/finetune/further.json).
DEFAULT_PROTOCOL = ScoringProtocol(
    name="default",
    match="auto",
    negative=0.25,  # selected for output_layer + embedding, and used for knn
    selected_on=tuple(f"{name}/{target}" for (name, _), targets in _SELECTED_ON.items() for target in targets),
    selected_runs={f"{name}/{target}": runs for (name, runs), targets in _SELECTED_ON.items() for target in targets},
)

# For a new model, the estimate predicts questions other than the known ones better than the mean. For further training
# the mean is better for these too (experiments/selection).
TASK_PROTOCOL = DEFAULT_PROTOCOL.model_copy(update={"task": "estimate"})


def resolve_protocol(
    protocol: ScoringProtocol | Path | str | None,
    artifact: ArtifactReader,
    *,
    known_questions: bool = False,
    subsets: bool = False,
) -> ScoringProtocol:
    """Return the protocol itself, read it from a file, or (None) return the built-in protocol for the artifact.

    Args:
        protocol: protocol, or its file.
        artifact: artifact for which the built-in protocol is chosen.
        known_questions: predictions are compared with losses on the questions of the artifact.
        subsets: subsets are predicted, instead of rows being ranked or selected.
    """
    if isinstance(protocol, ScoringProtocol):
        return protocol
    if protocol is not None:
        return load_protocol(protocol)
    if (rule := artifact.feature_settings.get("rule")) in entries(GROUP):
        built_in = registered_protocol(rule).built_in()
        if set(built_in.arrays) <= set(artifact.array_names):
            return built_in
    replayed = subsets and f"relevance_{REPLAY}" in artifact.array_names
    return DEFAULT_PROTOCOL if not artifact.rule.for_new_model or known_questions or replayed else TASK_PROTOCOL
