"""The rule that adds relevance up to a prediction, as a small file that also says where it comes from."""

import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator

from grasp.artifact.reader import RENAMED_KERNELS, RENAMED_SETTINGS, ArtifactReader
from grasp.errors import ProtocolError, SettingsError
from grasp.files import written_aside
from grasp.settings import Positions, Settings
from grasp.yaml_files import read_yaml, validated, write_yaml

Match = str  # a kernel by its name
BESIDE_GRADIENT = 0.25  # weight of output_layer and of embedding beside `gradient`
# What protocol files may say of interactions where there are none: `grasp.geometry` has these settings.
STANDARDS = {"task": "mean_relevance", "unit": "own_relevance"}
NO_INTERACTION = {"side": "retained", "weighting": "mean", "components": {}, "standardize": STANDARDS}
CALIBRATION = "calibration"  # what it says is of interactions alone


class Requirements(Settings):
    """How an artifact must have been built for the protocol to be used on it; what is left out may be anything."""

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
    """How a subset is scored: the effects of its rows, added up. Source: eq:method-additive.

    A protocol in which rows bear on one another is read as one of `grasp.geometry`, which is this and more.
    """

    beside: ClassVar[bool] = False  # whether `grasp.geometry` binds it to an artifact
    interacts: ClassVar[bool] = False  # whether a subset is worth more, or less, than the mean of its rows
    searches: ClassVar[bool] = False  # whether the worth of a row depends on the rows beside it: choosing is a search
    beside_kernels: ClassVar[str] = ""  # what it adds to its kernels, in words

    name: str = Field(min_length=1, description="Name of the protocol.")
    match: dict[Match, float] | Literal["auto"] = Field(
        "auto",
        description="Weights of the kernels, each standardised; auto: output_layer, embedding and knn; of a model that "
        f"is trained further gradient and {BESIDE_GRADIENT:g} each of output_layer and embedding; without it "
        "output_layer, embedding, hidden_bias and hidden_linear; else pooled.",
    )
    negative: float = Field(
        1.0,
        ge=0,
        le=1,
        description="What a row's negative relevance to a unit is multiplied by: 1 keeps it, 0 drops it. That of "
        "`gradient`, whose sign is as good as its size, is always kept.",
    )
    task: Literal["mean", "estimate"] = Field(
        "mean",
        description="What a row is worth to a task. mean: its mean relevance to the known questions. estimate: an "
        "estimate of its mean over all questions of the task, from its relevance and its text.",
    )
    requires: Requirements = Requirements()
    selected_on: tuple[str, ...] | None = Field(
        None, description="Development environments that the protocol was selected on; null: none."
    )
    selected_runs: dict[str, str] = Field(
        {}, description="Fingerprint of the runs behind each of selected_on, by which they are known in any directory."
    )

    @field_validator("match")
    @classmethod
    def _some_match(cls, match: dict[Match, float] | str) -> dict[Match, float] | str:
        if isinstance(match, dict) and not any(match.values()):
            raise ValueError("expected auto, or at least one kernel with a weight other than 0, e.g. {output_layer: 1}")
        if isinstance(match, dict) and not all(math.isfinite(weight) for weight in match.values()):
            raise ValueError("weights must be finite")
        return match

    def negative_of(self, kernel: str) -> float:
        """What negative relevance by a kernel is multiplied by."""
        return 1.0 if kernel == "gradient" else self.negative

    @property
    def provenance(self) -> str:
        """How the protocol was chosen, in words: the development results it was selected on, or that it was not."""
        if self.selected_on:
            return f"selected on {', '.join(self.selected_on)}"
        return "not selected on development environments" + (": additive core" if not self.searches else "")

    def chosen_on(self, fingerprint: str) -> set[str]:
        """Targets of the runs with this fingerprint by which the protocol was selected."""
        return chosen_on({name: self.selected_runs.get(name, "") for name in self.selected_on or ()}, fingerprint)

    @property
    def arrays(self) -> tuple[str, ...]:
        """Arrays of an artifact that a fitted protocol reads."""
        return tuple(f"relevance_{kernel}" for kernel in kernel_weights(self))

    @property
    def in_words(self) -> str:
        """A fitted protocol in one line: what it adds up, and what it was selected on."""
        weights = kernel_weights(self)
        kernels = " + ".join(kernel if weight == 1 else f"{weight:g} {kernel}" for kernel, weight in weights.items())
        less = any(self.negative_of(kernel) != 1 for kernel in weights)
        negative = f", negative relevance times {self.negative:g}" if less else ""
        results = len(self.selected_on or ())
        chosen = f"selected on {results} development results" if results else "not selected on development results"
        return f"protocol {self.name} ({kernels}{negative}{self.beside_kernels}; {chosen})"

    @property
    def additive(self) -> "ScoringProtocol":
        """The same without what rows do to one another."""
        return self

    def fitted(self, array_names: Sequence[str], feature_settings: Mapping[str, Any]) -> Self:
        """This protocol with `match: auto` resolved, if the artifact can serve it.

        Raises:
            ProtocolError: kernels or sketches that the artifact lacks, feature settings other than required;
                all of them in one message.
        """
        if self.match == "auto":
            there = [name.removeprefix("relevance_") for name in array_names]
            first = [kernel for kernel in ("output_layer", "embedding") if kernel in there]
            beside = ("knn",) if "knn" in there else ("hidden_bias", "hidden_linear")  # by what is trained
            match = dict.fromkeys((*first, *(kernel for kernel in beside if kernel in there)), 1.0)
            if "gradient" in there:
                match = dict.fromkeys(first, BESIDE_GRADIENT) | {"gradient": 1.0}
            if "output_layer" not in there:
                match = {"pooled": 1.0}
        else:
            match = {kernel: weight for kernel, weight in self.match.items() if weight}
        fitted = self.model_copy(update={"match": match})
        missing = [name for name in fitted.arrays if name not in array_names]
        problems = [f"needs array {name!r}, the artifact has {list(array_names)}" for name in missing]
        for field, expected in self.requires.model_dump(exclude_none=True).items():
            found = feature_settings.get(field)
            if found != expected:
                problems.append(f"features.{field}: requires {expected!r}, the artifact was built with {found!r}")
        if problems:
            raise ProtocolError(
                f"protocol {self.name!r} does not fit the artifact: {'; '.join(problems)}; "
                "build an artifact with these settings, or choose another protocol"
            )
        return fitted


def kernel_weights(protocol: ScoringProtocol) -> dict[str, float]:
    """Kernels of a fitted protocol and their weights."""
    assert isinstance(protocol.match, dict)
    return {str(kernel): weight for kernel, weight in protocol.match.items()}


def chosen_on(runs: Mapping[str, str], fingerprint: str) -> set[str]:
    """Targets of the runs with this fingerprint, out of fingerprints by `environment/target`."""
    return {result.partition("/")[2] for result, theirs in runs.items() if theirs == fingerprint}


# Development runs that the built-in rule was selected on: environment, fingerprint of its runs, and targets. From
# `documents` on they are of experiments/finetune, where a pretrained model is trained further.
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
# What stands beside output_layer and embedding follows from what is trained: knn for a new model; gradient, with a
# quarter each of output_layer and embedding, for one that is trained further (experiments/finetune/further.json), or
# hidden_bias and hidden_linear if it was read without a backward pass (experiments/finetune/choice.json).
DEFAULT_PROTOCOL = ScoringProtocol(
    name="default",
    match="auto",
    negative=0.25,  # selected for output_layer + embedding, taken over for the other kernels of a forward pass
    task="estimate",  # experiments/selection
    selected_on=tuple(f"{name}/{target}" for (name, _), targets in _SELECTED_ON.items() for target in targets),
    selected_runs={f"{name}/{target}": runs for (name, runs), targets in _SELECTED_ON.items() for target in targets},
)


def as_protocol(protocol: ScoringProtocol | Path | str | None, artifact: ArtifactReader) -> ScoringProtocol:
    """Return a protocol as it is, or read its file; for None return the built-in rule that fits the artifact.

    That is the paper's where `rule: paper` built what it reads, else the default.
    """
    if isinstance(protocol, ScoringProtocol):
        return protocol
    if protocol is not None:
        return load_protocol(protocol)
    if artifact.feature_settings.get("rule") == "paper":
        paper: ScoringProtocol = geometry().PAPER
        if set(paper.arrays) <= set(artifact.array_names):  # settings may name other kernels
            return paper
    return DEFAULT_PROTOCOL


def load_protocol(path: Path | str) -> ScoringProtocol:
    """Read a protocol from YAML (JSON is YAML too); every mismatch is in the message."""
    try:
        return protocol_from(read_yaml(Path(path)), f"protocol {path}")
    except SettingsError as err:
        raise ProtocolError(str(err)) from err


def protocol_from(settings: Mapping[str, Any], where: str) -> ScoringProtocol:
    """A protocol from plain settings; one in which rows bear on one another is `grasp.geometry`'s to read.

    Kernels and settings may have the names of version 0.2.
    """
    settings = _with_present_names(settings)
    if any(name in settings and settings[name] != nothing for name, nothing in NO_INTERACTION.items()):
        read_by: type[ScoringProtocol] = geometry().protocol_type
        return validated(read_by, settings, where, ProtocolError)
    left = {name: value for name, value in settings.items() if name not in (*NO_INTERACTION, CALIBRATION)}
    return validated(ScoringProtocol, left, where, ProtocolError)


def _with_present_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    new = {"match": RENAMED_KERNELS, "requires": RENAMED_SETTINGS}
    return {
        field: {new[field].get(name, name): value for name, value in found.items()}
        if field in new and isinstance(found, Mapping)
        else found
        for field, found in settings.items()
    }


def save_protocol(protocol: ScoringProtocol, path: Path | str) -> None:
    """Write a protocol so that `load_protocol` gives it back: YAML, or JSON by its name; it appears only when whole."""
    target = Path(path)
    if target.suffix != ".json":
        write_yaml(protocol.model_dump(mode="json"), target)
        return
    with written_aside(target) as part:
        part.write_text(protocol.model_dump_json(indent=1) + "\n", encoding="utf-8")


def geometry() -> ModuleType:
    """The room beside the road, opened when a protocol in which rows bear on one another asks for it."""
    return import_module("grasp.geometry.geometry_entry")
