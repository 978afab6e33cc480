"""Scoring protocols: how the relevance of rows is combined into a prediction.

A protocol has a weight w_k for each kernel k; in files, the setting `match` holds these weights. With r_kie the
relevance of row i to question e by kernel k, the effect of a row on a task is, up to a constant and a factor of the
task,

    effect_i = sum_k w_k a_ki / sd_i(a_ki),    a_ki = mean_e r_kie, where negative r_kie are multiplied by `negative`

`match: auto` means weights that depend on the kernels of the artifact, see `auto_kernel_weights`; these depend on
whether it was built for a *new model* that is trained from scratch on the corpus (`build --train new`), or for *further
training* of an existing model (`--train further`). `ScoringProtocol.resolved_for` replaces `auto` by the weights: the
protocol is then *resolved*.

`grasp.predict.default_protocol` chooses the built-in protocol, and `grasp.predict.predictor` computes the effects. With
`task: estimate`, the mean over the known questions is replaced by an estimate for all questions of the task
(`grasp.predict.task_scores`). Protocols with interactions between rows are defined in `grasp.geometry`, which
`geometry()` imports lazily. Labels such as eq:method-additive are those of the paper, see docs/paper_map.md.
"""

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator

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
    def _check_kernel_weights(cls, weights: dict[KernelName, float] | str) -> dict[KernelName, float] | str:
        if isinstance(weights, dict) and not any(weights.values()):
            raise ValueError("expected auto, or at least one kernel with a weight other than 0, e.g. {output_layer: 1}")
        if isinstance(weights, dict) and not all(math.isfinite(weight) for weight in weights.values()):
            raise ValueError("weights must be finite")
        return weights

    def negative_factor(self, kernel: str) -> float:
        """Return the factor for negative relevance of a kernel."""
        return 1.0 if kernel in ("gradient", REPLAY) else self.negative

    @property
    def selection_summary(self) -> str:
        """The names of the development results that the protocol was selected on, as text."""
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
        """Arrays of the artifact that a resolved protocol reads."""
        return tuple(f"relevance_{kernel}" for kernel in kernel_weights(self))

    @property
    def description(self) -> str:
        """One line on a resolved protocol: its kernels with weights, and how many results it was selected on."""
        weights = kernel_weights(self)
        kernels = " + ".join(kernel if weight == 1 else f"{weight:g} {kernel}" for kernel, weight in weights.items())
        is_downweighted = any(self.negative_factor(kernel) != 1 for kernel in weights)
        negative = f", negative relevance times {self.negative:g}" if is_downweighted else ""
        results = len(self.selected_on or ())
        selection = f"selected on {results} development results" if results else "not selected on development results"
        return f"protocol {self.name} ({kernels}{negative}{self.geometry_terms}; {selection})"

    @property
    def additive(self) -> "ScoringProtocol":
        """The protocol without interactions between rows."""
        return self

    @property
    def for_units(self) -> Self:
        """The resolved protocol for single units: without `replay`, which is the same for all units of a target."""
        weights = {kernel: weight for kernel, weight in kernel_weights(self).items() if kernel != REPLAY}
        return self.model_copy(update={"match": weights}) if weights else self

    def resolved_for(self, array_names: Sequence[str], feature_settings: Mapping[str, Any]) -> Self:
        """Resolve `match: auto` for an artifact, and check that the artifact has what the protocol requires.

        Args:
            array_names: names of the arrays of the artifact.
            feature_settings: settings that the artifact was built with, by name.
        Raises:
            ProtocolError: missing kernels or sketches, or other feature settings than required; the message lists all
                problems.
        """
        if self.match == "auto":
            weights = auto_kernel_weights(array_names, estimate=self.task == "estimate")
        else:
            weights = {kernel: weight for kernel, weight in self.match.items() if weight}
        resolved = self.model_copy(update={"match": weights})
        missing = [name for name in resolved.arrays if name not in array_names]
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
        return resolved


def auto_kernel_weights(array_names: Sequence[str], *, estimate: bool) -> dict[KernelName, float]:
    """Return the weights of `match: auto` for an artifact with these arrays.

        artifact built for                        weights
        new model                                 output_layer + embedding + knn
        further training                          gradient + .25 output_layer + .25 embedding
        further training without a backward pass  output_layer + embedding + hidden_bias + hidden_linear
        the paper's protocol (`rule: paper`)      pooled
        targets with a replay                     also 4 replay; for a new model also 1 replay, unless `estimate`

    Args:
        array_names: names of the arrays of the artifact.
        estimate: whether the protocol has `task: estimate`.
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
    if REPLAY in available and not is_new_model(array_names):
        weights[REPLAY] = REPLAY_WEIGHT
    elif REPLAY in available and not estimate:
        weights[REPLAY] = NEW_MODEL_REPLAY_WEIGHT
    return weights


def kernel_weights(protocol: ScoringProtocol) -> dict[str, float]:
    """Return the kernels of a resolved protocol with their weights."""
    assert isinstance(protocol.match, dict)
    return {str(kernel): weight for kernel, weight in protocol.match.items()}


def targets_selected_on(runs: Mapping[str, str], fingerprint: str) -> set[str]:
    """Return the targets whose runs have this fingerprint, from fingerprints by `environment/target`."""
    return {result.partition("/")[2] for result, runs_fingerprint in runs.items() if runs_fingerprint == fingerprint}


def is_new_model(array_names: Sequence[str]) -> bool:
    """Return whether an artifact was built for a new model: the kernel knn is computed for new models only."""
    return "relevance_knn" in array_names and "relevance_gradient" not in array_names


def load_protocol(path: Path | str) -> ScoringProtocol:
    """Read a protocol from a YAML or JSON file; the message of an error lists every problem."""
    try:
        return parse_protocol(read_yaml(Path(path)), f"protocol {path}")
    except SettingsError as err:
        raise ProtocolError(str(err)) from err


def parse_protocol(settings: Mapping[str, Any], location: str) -> ScoringProtocol:
    """Create a protocol from plain settings, an `InteractionProtocol` if any setting asks for interactions.

    Args:
        settings: values by name.
        location: origin of the settings, for messages.
    Raises:
        ProtocolError: invalid settings.
    """
    if any(name in settings and settings[name] != neutral for name, neutral in NO_INTERACTION.items()):
        protocol_type: type[ScoringProtocol] = geometry().protocol_type
        return validated(protocol_type, dict(settings), location, ProtocolError)
    additive = {name: value for name, value in settings.items() if name not in (*NO_INTERACTION, CALIBRATION)}
    return validated(ScoringProtocol, additive, location, ProtocolError)


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
