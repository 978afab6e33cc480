"""Scoring protocols: how the relevance of rows is combined into a prediction.

A protocol has a weight w_k for each kernel k; in files, the setting `match` holds these weights. With r_kie the
relevance of row i to question e by kernel k, the effect of a row on a task is, up to a constant and a factor of the
task,

    effect_i = sum_k w_k a_ki / sd_i(a_ki),    a_ki = mean_e r_kie, where negative r_kie are multiplied by `negative`

`match: auto` means weights that depend on the kernels of the artifact, see `grasp.kernel_table`; these depend on
whether it was built for a *new model* that is trained from scratch on the corpus (`build --train new`), or for *further
training* of an existing model (`--train further`). `ScoringProtocol.resolved_for` replaces `auto` by the weights: the
protocol is then *resolved*.

`grasp.predict.default_protocol` chooses the built-in protocol, and `grasp.predict.predictor` computes the effects. With
`task: estimate`, the mean over the known questions is replaced by an estimate for all questions of the task
(`grasp.predict.task_scores`). Other packages define further kinds of protocols, see `RegisteredProtocol`. Labels such
as eq:method-additive are those of the paper, see docs/paper_map.md.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator

from grasp.artifact.reader import ArtifactReader
from grasp.entry_points import entries, load
from grasp.errors import ProtocolError
from grasp.files import atomic_path
from grasp.kernel_table import REPLAY
from grasp.settings import Positions, Settings
from grasp.yaml_files import read_yaml, validated, write_yaml

if TYPE_CHECKING:
    from grasp.predict.predictor import Predictor, UnitSelection

GROUP = "grasp.protocols"  # entry points

KernelName = str


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


class ScoringProtocol(Settings):
    """An additive scoring protocol: a subset is scored by the mean effect of its rows. Source: eq:method-additive."""

    is_additive: ClassVar[bool] = True  # whether the change of a subset is the mean effect of its rows
    further_terms: ClassVar[str] = ""  # the terms added to the kernels, as text for `description`

    name: str = Field(min_length=1, description="Name of the protocol.")
    match: dict[KernelName, float] | Literal["auto"] = Field(
        "auto",
        description="Weights of the kernels, each standardised; auto: those of `grasp.kernel_table` for the training "
        "that the artifact was built for.",
    )
    negative: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Factor of negative relevance: 1 retains it, 0 drops it. That of `gradient` and `replay`, whose "
        "sign is reliable, is retained.",
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
        if isinstance(weights, dict) and not (any(weights.values()) and all(map(math.isfinite, weights.values()))):
            raise ValueError("expected auto, or finite weights of kernels, one or more other than 0: {output_layer: 1}")
        return weights

    def negative_factor(self, kernel: str) -> float:
        """Return the factor for negative relevance of a kernel."""
        return 1.0 if kernel in ("gradient", REPLAY) else self.negative

    @property
    def selection_summary(self) -> str:
        """The names of the development results that the protocol was selected on, as text."""
        if self.selected_on:
            return f"selected on {', '.join(self.selected_on)}"
        return "not selected on development environments" + (": additive core" if self.is_additive else "")

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
        return f"protocol {self.name} ({kernels}{negative}{self.further_terms}; {selection})"

    @property
    def additive(self) -> "ScoringProtocol":
        """The protocol by which rows are ranked and selected: the mean effect of the retained rows."""
        return self

    def for_runs(self, family: str | None) -> Self:
        """Return the protocol that predicts the subsets of runs.

        Args:
            family: family that the subsets were drawn from, such as `uniform:0.5`; None: a table of subsets.
        """
        del family
        return self

    @property
    def for_units(self) -> Self:
        """The resolved protocol for single units: without `replay`, which is the same for all units of a target."""
        weights = {kernel: weight for kernel, weight in kernel_weights(self).items() if kernel != REPLAY}
        return self.model_copy(update={"match": weights}) if weights else self

    def resolved_for(self, artifact: ArtifactReader) -> Self:
        """Resolve `match: auto` for an artifact, and check that the artifact has what the protocol requires.

        Raises:
            ProtocolError: missing kernels or sketches, or other feature settings than required; the message lists all
                problems.
        """
        array_names, feature_settings = artifact.array_names, artifact.feature_settings
        if self.match != "auto":
            weights = {kernel: weight for kernel, weight in self.match.items() if weight}
        elif f"relevance_{REPLAY}" in array_names:
            weights = artifact.rule.with_replay(estimate=self.task == "estimate")
        else:
            weights = artifact.rule.weights
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


class RegisteredProtocol(ScoringProtocol):
    """A scoring protocol that another package defines: base class of the entry points of the group `grasp.protocols`.

    The name of the entry point is a value of the build setting `rule`. Predictions by artifacts that were built with
    this rule use the protocol `built_in`.

    Attributes:
        kernels: kernels that are built with the rule, besides the sketches of every build.
        feature_defaults: further build settings `features` of the rule, by name.
    """

    kernels: ClassVar[tuple[str, ...]]
    feature_defaults: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    @abstractmethod
    def built_in(cls) -> Self:
        """Return the protocol for artifacts that were built with the rule."""

    @classmethod
    @abstractmethod
    def parse(cls, settings: Mapping[str, Any], location: str) -> ScoringProtocol | None:
        """Create a protocol from the settings of a file; None if this package does not define such protocols.

        Args:
            settings: values by name.
            location: origin of the settings, for messages.
        Raises:
            ProtocolError: invalid settings.
        """

    @abstractmethod
    def bind(
        self,
        artifact: ArtifactReader,
        units: "UnitSelection",
        *,
        sketches: Sequence[str],
        per_unit: bool,
    ) -> "Predictor":
        """Create the predictor of a resolved protocol; see `Predictor.from_artifact` for the arguments."""


def kernel_weights(protocol: ScoringProtocol) -> dict[str, float]:
    """Return the kernels of a resolved protocol with their weights."""
    assert isinstance(protocol.match, dict)
    return {str(kernel): weight for kernel, weight in protocol.match.items()}


def targets_selected_on(runs: Mapping[str, str], fingerprint: str) -> set[str]:
    """Return the targets whose runs have this fingerprint, from fingerprints by `environment/target`."""
    return {result.partition("/")[2] for result, runs_fingerprint in runs.items() if runs_fingerprint == fingerprint}


def load_protocol(path: Path | str) -> ScoringProtocol:
    """Read a protocol from a YAML or JSON file.

    Raises:
        SettingsError: the file cannot be read.
        ProtocolError: invalid settings; the message lists every problem.
    """
    return parse_protocol(read_yaml(Path(path)), f"protocol {path}")


def parse_protocol(settings: Mapping[str, Any], location: str) -> ScoringProtocol:
    """Create a protocol from plain settings, of the package that recognises them or else an additive one.

    Args:
        settings: values by name.
        location: origin of the settings, for messages.
    Raises:
        ProtocolError: invalid settings.
    """
    for name in entries(GROUP):
        if (protocol := registered_protocol(name).parse(settings, location)) is not None:
            return protocol
    return validated(ScoringProtocol, dict(settings), location, ProtocolError)


def registered_protocol(name: str) -> type[RegisteredProtocol]:
    """Return the class of protocols that a package registers under a name."""
    loaded: type[RegisteredProtocol] = load(GROUP, name, RegisteredProtocol)
    return loaded


def save_protocol(protocol: ScoringProtocol, path: Path | str) -> None:
    """Write a protocol atomically, as JSON if the name ends in .json and as YAML otherwise."""
    destination = Path(path)
    if destination.suffix != ".json":
        write_yaml(protocol.model_dump(mode="json"), destination)
        return
    with atomic_path(destination) as temporary:
        temporary.write_text(protocol.model_dump_json(indent=1) + "\n", encoding="utf-8")
