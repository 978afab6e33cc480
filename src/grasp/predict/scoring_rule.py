"""Scoring protocols: how the relevance of rows is combined into a prediction, and how the protocol was selected.

A protocol has a weight w_k for each kernel k. With r_kie the relevance of row i to question e by kernel k, the effect
of a row on a task is, up to a constant and a factor of the task,

    effect_i = sum_k w_k a_ki / sd_i(a_ki),    a_ki = mean_e r_kie, where negative r_kie are multiplied by `negative`

The weights of the built-in protocol depend on what the artifact was built for: a *new model* that is trained from
scratch on the corpus (`build --train new`), or *further training* of an existing model (`--train further`); and on the
kernels that it has. See `_default_weights`.

`grasp.predict.predictor` computes the effects; `task: estimate` replaces the mean over the known questions by an
estimate for all questions of the task (`grasp.predict.task_scores`). Equations are those of the paper, see
docs/paper_map.md. Start with `resolve_protocol`, which returns the built-in protocol or reads one from YAML or JSON.
Protocols with interactions between rows are defined in `grasp.geometry`, which `geometry()` imports lazily.
"""

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator

from grasp.artifact.reader import RENAMED_KERNELS, RENAMED_SETTINGS, ArtifactReader
from grasp.errors import ProtocolError, SettingsError
from grasp.files import atomic_path
from grasp.settings import Positions, Settings
from grasp.yaml_files import read_yaml, validated, write_yaml

KernelName = str
GRADIENT_COMPANION_WEIGHT = 0.25  # weight of output_layer and embedding when combined with `gradient`
REPLAY = "replay"  # kernel whose relevance is of whole targets: the derivative of a replayed training
REPLAY_WEIGHT = 4.0  # its weight for further training: experiments/replay
NEW_MODEL_REPLAY_WEIGHT = 1.0  # for a new model, chosen on cc-topic: experiments/replay
# Settings of `grasp.geometry` with the values that mean "no interaction"; a protocol file may contain them.
STANDARDS = {"task": "mean_relevance", "unit": "own_relevance"}
NO_INTERACTION = {"side": "retained", "weighting": "mean", "components": {}, "standardize": STANDARDS}
CALIBRATION = "calibration"  # setting that only matters for interactions


class Interaction(Enum):
    """How the predicted change of a subset differs from the mean effect of its retained rows."""

    NONE = "none"  # no difference
    # rows are summed instead of averaged, or the omitted rows are scored; rows remain independent
    WEIGHTING = "weighting"
    PAIRS = "pairs"  # pairs of rows contribute too, so selecting the best subset is a search problem


class Requirements(Settings):
    """Build settings that the protocol requires of an artifact; settings that are None are not checked."""

    summary_positions: Positions | None = Field(None, description="Positions that summaries average.")
    positions: Positions | None = Field(None, description="Positions of a row that kernels read.")
    top_k: int | None = Field(None, description="Probabilities kept per residual.")
    alpha: float | None = Field(None, description="Exponent of the preconditioners.")
    epsilon: float | None = Field(None, description="Their eps, relative to the mean.")
    tau: float | None = Field(None, description="Tikhonov term of the whitening.")
    hidden_width: int | None = Field(None, description="Width of the hidden sketch.")
    residual_width: int | None = Field(None, description="Width of the residual sketch.")
    product_width: int | None = Field(None, description="Width of the product sketch.")


class ScoringProtocol(Settings):
    """An additive scoring protocol: a subset is scored by the mean effect of its rows. Source: eq:method-additive.

    Protocols with interactions between rows are the subclass `grasp.geometry.geometry_rule.InteractionProtocol`.
    """

    needs_geometry: ClassVar[bool] = False  # whether `grasp.geometry` binds it to an artifact
    interaction: ClassVar[Interaction] = Interaction.NONE
    geometry_terms: ClassVar[str] = ""  # the terms added to the kernels, as text for `description`

    name: str = Field(min_length=1, description="Name of the protocol.")
    match: dict[KernelName, float] | Literal["auto"] = Field(
        "auto",
        description="Weights of the kernels, each standardised; auto: output_layer, embedding and knn; of a model that "
        f"is trained further gradient and {GRADIENT_COMPANION_WEIGHT:g} each of output_layer and embedding; without it "
        "output_layer, embedding, hidden_bias and hidden_linear; else pooled. Targets with a replay: also "
        f"{REPLAY_WEIGHT:g} replay, or {NEW_MODEL_REPLAY_WEIGHT:g} for a new model, but not with task: estimate.",
    )
    negative: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Factor of negative relevance: 1 retains it, 0 drops it. Negative relevance of `gradient` and "
        "`replay`, whose sign is as reliable as its size, is always retained.",
    )
    task: Literal["mean", "estimate"] = Field(
        "mean",
        description="Score of a row for a task. mean: mean relevance to the known questions. estimate: estimate of the "
        "mean over all questions of the task, from relevance and text.",
    )
    requires: Requirements = Requirements()
    selected_on: tuple[str, ...] | None = Field(
        None, description="Development environments that the protocol was selected on; null: none."
    )
    selected_runs: dict[str, str] = Field(
        {}, description="Fingerprint of the runs of each entry of selected_on, which identifies them in any directory."
    )

    @field_validator("match")
    @classmethod
    def _some_match(cls, match: dict[KernelName, float] | str) -> dict[KernelName, float] | str:
        if isinstance(match, dict) and not any(match.values()):
            raise ValueError("expected auto, or at least one kernel with a weight other than 0, e.g. {output_layer: 1}")
        if isinstance(match, dict) and not all(math.isfinite(weight) for weight in match.values()):
            raise ValueError("weights must be finite")
        return match

    def negative_of(self, kernel: str) -> float:
        """Return the factor for negative relevance of a kernel."""
        return 1.0 if kernel in ("gradient", REPLAY) else self.negative

    @property
    def provenance(self) -> str:
        """The development results that the protocol was selected on, as text."""
        if self.selected_on:
            return f"selected on {', '.join(self.selected_on)}"
        return "not selected on development environments" + (
            ": additive core" if self.interaction is not Interaction.PAIRS else ""
        )

    def targets_selected_on(self, fingerprint: str) -> set[str]:
        """Return the targets on which the protocol was selected, for the runs with this fingerprint."""
        runs = {name: self.selected_runs.get(name, "") for name in self.selected_on or ()}
        return targets_selected_on(runs, fingerprint)

    @property
    def arrays(self) -> tuple[str, ...]:
        """Arrays of the artifact that a fitted protocol reads."""
        return tuple(f"relevance_{kernel}" for kernel in kernel_weights(self))

    @property
    def description(self) -> str:
        """One line that describes a fitted protocol: its kernels with weights, and what it was selected on."""
        weights = kernel_weights(self)
        kernels = " + ".join(kernel if weight == 1 else f"{weight:g} {kernel}" for kernel, weight in weights.items())
        is_downweighted = any(self.negative_of(kernel) != 1 for kernel in weights)
        negative = f", negative relevance times {self.negative:g}" if is_downweighted else ""
        results = len(self.selected_on or ())
        selection = f"selected on {results} development results" if results else "not selected on development results"
        return f"protocol {self.name} ({kernels}{negative}{self.geometry_terms}; {selection})"

    @property
    def additive(self) -> "ScoringProtocol":
        """The protocol without interactions between rows."""
        return self

    @property
    def of_units(self) -> Self:
        """The fitted protocol for single units: without `replay`, which is the same for all units of a target."""
        match = {kernel: weight for kernel, weight in kernel_weights(self).items() if kernel != REPLAY}
        return self.model_copy(update={"match": match}) if match else self

    def fitted(self, array_names: Sequence[str], feature_settings: Mapping[str, Any]) -> Self:
        """Resolve `match: auto` for an artifact, and check that the artifact has what the protocol requires.

        Raises:
            ProtocolError: missing kernels or sketches, or other feature settings than required; the message lists all
                problems.
        """
        if self.match == "auto":
            match = _default_weights(array_names, estimates=self.task == "estimate")
        else:
            match = {kernel: weight for kernel, weight in self.match.items() if weight}
        fitted = self.model_copy(update={"match": match})
        missing = [name for name in fitted.arrays if name not in array_names]
        problems = [f"requires array {name!r}, the artifact has {list(array_names)}" for name in missing]
        for setting, expected in self.requires.model_dump(exclude_none=True).items():
            actual = feature_settings.get(setting)
            if actual != expected:
                problems.append(f"features.{setting}: requires {expected!r}, the artifact was built with {actual!r}")
        if problems:
            raise ProtocolError(
                f"protocol {self.name!r} does not fit the artifact: {'; '.join(problems)}; "
                "build an artifact with these settings, or use another protocol"
            )
        return fitted


def _default_weights(array_names: Sequence[str], *, estimates: bool) -> dict[KernelName, float]:
    """Return the weights of `match: auto` for an artifact with these arrays.

        new model                                 output_layer + embedding + knn
        further training                          gradient + .25 output_layer + .25 embedding
        further training without a backward pass  output_layer + embedding + hidden_bias + hidden_linear
        built with `rule: paper`                  pooled
        targets with a replay                     also 4 replay; 1 replay for a new model, unless tasks are estimated

    Args:
        array_names: names of the arrays of the artifact.
        estimates: whether the protocol estimates other questions; then a new model is scored without `replay`.
    """
    available = [name.removeprefix("relevance_") for name in array_names]
    base_kernels = [kernel for kernel in ("output_layer", "embedding") if kernel in available]
    if "output_layer" not in available:
        weights = {"pooled": 1.0}
    elif "gradient" in available:
        weights = dict.fromkeys(base_kernels, GRADIENT_COMPANION_WEIGHT) | {"gradient": 1.0}
    else:
        # knn for a new model; hidden_bias and hidden_linear for further training without a backward pass
        companions = ("knn",) if "knn" in available else ("hidden_bias", "hidden_linear")
        weights = dict.fromkeys((*base_kernels, *(kernel for kernel in companions if kernel in available)), 1.0)
    if REPLAY in available and not _is_new_model(array_names):
        weights[REPLAY] = REPLAY_WEIGHT
    elif REPLAY in available and not estimates:
        weights[REPLAY] = NEW_MODEL_REPLAY_WEIGHT
    return weights


def kernel_weights(protocol: ScoringProtocol) -> dict[str, float]:
    """Return the kernels of a fitted protocol with their weights."""
    assert isinstance(protocol.match, dict)
    return {str(kernel): weight for kernel, weight in protocol.match.items()}


def targets_selected_on(runs: Mapping[str, str], fingerprint: str) -> set[str]:
    """Return the targets whose runs have this fingerprint, from fingerprints by `environment/target`."""
    return {result.partition("/")[2] for result, runs_fingerprint in runs.items() if runs_fingerprint == fingerprint}


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

# Selected by the highest lower confidence bound, out of the protocols without geometry of
# experiments/lds_main/additive.yaml and the kernels of experiments/finetune; default.provenance.json has the bounds.
# The kernels combined with output_layer and embedding depend on the training: knn for a new model; gradient, with a
# quarter each of output_layer and embedding, for further training (experiments/finetune/further.json), or hidden_bias
# and hidden_linear if the artifact was built without a backward pass (experiments/finetune/choice.json).
DEFAULT_PROTOCOL = ScoringProtocol(
    name="default",
    match="auto",
    negative=0.25,  # selected for output_layer + embedding, and used for the other forward-pass kernels
    selected_on=tuple(f"{name}/{target}" for (name, _), targets in _SELECTED_ON.items() for target in targets),
    selected_runs={f"{name}/{target}": runs for (name, runs), targets in _SELECTED_ON.items() for target in targets},
)


# The built-in protocol for a new model, where the estimate gains more on other questions. For further training the mean
# agrees better with other questions (experiments/selection). Runs are measured on the known questions, so that
# comparisons with runs use DEFAULT_PROTOCOL.
TASK_PROTOCOL = DEFAULT_PROTOCOL.model_copy(update={"task": "estimate"})


def _is_new_model(array_names: Sequence[str]) -> bool:
    """Return whether an artifact is for a new model, by its kernels."""
    return "relevance_knn" in array_names and "relevance_gradient" not in array_names


def resolve_protocol(
    protocol: ScoringProtocol | Path | str | None,
    artifact: ArtifactReader,
    *,
    known_questions: bool = False,
    subsets: bool = False,
) -> ScoringProtocol:
    """Return the protocol itself, read it from a file, or (None) return the built-in protocol for the artifact.

    The built-in protocol is the paper's if the artifact was built with `rule: paper` and has its arrays. Otherwise it
    is TASK_PROTOCOL for a new model, and DEFAULT_PROTOCOL for further training or with `known_questions`.

    Args:
        protocol: protocol, or its file.
        artifact: artifact to which the built-in protocol is adapted.
        known_questions: predictions are compared with losses on the questions of the artifact.
        subsets: subsets are predicted, instead of rows being ranked or selected. For a new model with a replay that is
            DEFAULT_PROTOCOL too: the replay predicts subsets better, the other kernels select rows better.
    """
    if isinstance(protocol, ScoringProtocol):
        return protocol
    if protocol is not None:
        return load_protocol(protocol)
    if artifact.feature_settings.get("rule") == "paper":
        paper: ScoringProtocol = geometry().PAPER
        if set(paper.arrays) <= set(artifact.array_names):  # `rule: paper` may have been combined with other kernels
            return paper
    replayed = subsets and f"relevance_{REPLAY}" in artifact.array_names
    estimated = _is_new_model(artifact.array_names) and not (known_questions or replayed)
    return TASK_PROTOCOL if estimated else DEFAULT_PROTOCOL


def load_protocol(path: Path | str) -> ScoringProtocol:
    """Read a protocol from a YAML or JSON file; the message of an error lists every problem."""
    try:
        return parse_protocol(read_yaml(Path(path)), f"protocol {path}")
    except SettingsError as err:
        raise ProtocolError(str(err)) from err


def parse_protocol(settings: Mapping[str, Any], location: str) -> ScoringProtocol:
    """Create a protocol from plain settings, an `InteractionProtocol` if any setting asks for interactions.

    Kernels and settings may have their names of version 0.2.

    Args:
        settings: values by name.
        location: origin of the settings, for messages.
    Raises:
        ProtocolError: invalid settings.
    """
    renamed = _with_present_names(settings)
    if any(name in renamed and renamed[name] != neutral for name, neutral in NO_INTERACTION.items()):
        protocol_type: type[ScoringProtocol] = geometry().protocol_type
        return validated(protocol_type, renamed, location, ProtocolError)
    additive = {name: value for name, value in renamed.items() if name not in (*NO_INTERACTION, CALIBRATION)}
    return validated(ScoringProtocol, additive, location, ProtocolError)


def _with_present_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which names of version 0.2 are replaced by the present ones."""
    renamed = {"match": RENAMED_KERNELS, "requires": RENAMED_SETTINGS}
    return {
        field: {renamed[field].get(name, name): value for name, value in setting.items()}
        if field in renamed and isinstance(setting, Mapping)
        else setting
        for field, setting in settings.items()
    }


def save_protocol(protocol: ScoringProtocol, path: Path | str) -> None:
    """Write a protocol atomically, as JSON if the name ends in .json and as YAML otherwise."""
    destination = Path(path)
    if destination.suffix != ".json":
        write_yaml(protocol.model_dump(mode="json"), destination)
        return
    with atomic_path(destination) as temporary:
        temporary.write_text(protocol.model_dump_json(indent=1) + "\n", encoding="utf-8")


def geometry() -> ModuleType:
    """Import the optional subpackage for interactions between rows; additive protocols never load it."""
    return import_module("grasp.geometry.geometry_entry")
