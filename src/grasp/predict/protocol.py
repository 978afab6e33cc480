"""The rule that adds relevance up to a prediction, as a small file that also says where it comes from."""

import math
import re
from collections.abc import Mapping, Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import Field, field_validator

from grasp.errors import ProtocolError, SubsetError
from grasp.files import written_aside
from grasp.geometry.sums import Half, Kind, Weighting, halves_needed
from grasp.predict.blocks import Side
from grasp.predict.families import Family, parse_family
from grasp.settings import Positions, Settings
from grasp.yaml_files import validated_yaml, write_yaml

Match = Literal["token", "input", "neighbour", "shift", "tilt", "gradient", "pooled"]
COMPONENT = re.compile(rf"({'|'.join(get_args(Half))})\.({'|'.join(get_args(Kind))})")
BESIDE_GRADIENT = 0.25  # weight of token and of input beside `gradient`
NOT_SELECTED = "not selected on development environments: additive core"
NOT_SELECTED_OTHER = "not selected on development environments"


class Standardize(Settings):
    """What is brought to mean 0 and standard deviation 1, and when: over the rows, with geometry over the family."""

    task: Literal["mean_relevance", "mean_of_standardised"] = Field(
        "mean_relevance",
        description="mean_relevance: a task's relevance is the mean over its units. mean_of_standardised: each unit's "
        "is divided by its own standard deviation first.",
    )
    unit: Literal["own_relevance"] = Field("own_relevance", description="A unit is scored by its own relevance.")


class CalibrationSettings(Settings):
    """The family whose moments standardise a protocol with geometry; never the interventions that are scored."""

    family: str = Field("uniform:0.5", description="Family, e.g. uniform:0.5 or mixture:topic.")
    n_subsets: int = Field(256, ge=2, description="Subsets drawn, where moments have no closed form.")
    seed: int = Field(0, ge=0, description="Seed of the draw.")

    @field_validator("family")
    @classmethod
    def _is_family(cls, text: str) -> str:
        try:
            return str(parse_family(text))
        except SubsetError as err:
            raise ValueError(str(err)) from err

    @property
    def parsed(self) -> Family:
        return parse_family(self.family)


class Requirements(Settings):
    """How an artifact must have been built for the protocol to be used on it; what is left out may be anything."""

    pooling: Positions | None = Field(None, description="Positions averaged by `pooled`.")
    token_positions: Positions | None = Field(None, description="Row positions used by `token` and others.")
    top_k: int | None = Field(None, description="Probabilities kept per residual.")
    alpha: float | None = Field(None, description="Exponent of the preconditioners.")
    epsilon: float | None = Field(None, description="Their eps, relative to the mean.")
    tau: float | None = Field(None, description="Tikhonov term of the whitening.")
    hidden_width: int | None = Field(None, description="Width of the hidden sketch.")
    residual_width: int | None = Field(None, description="Width of the residual sketch.")
    product_width: int | None = Field(None, description="Width of the product sketch.")


class ScoringProtocol(Settings):
    """How a subset is scored. Source: eq:component-predictor; omega carries the sign, a penalty is negative."""

    name: str = Field(min_length=1, description="Name of the protocol.")
    side: Side = Field("retained", description="Rows that are scored; omitted flips the sign of A.")
    weighting: Weighting = Field("mean", description="count: w_i; mean: w_i / sum w.")
    match: dict[Match, float] | Literal["auto"] = Field(
        "auto",
        description="Weights of the kernels, each standardised; auto: token, input and neighbour; of a model that is "
        f"trained further gradient and {BESIDE_GRADIENT:g} each of token and input; without it token, input, shift and "
        "tilt; else pooled.",
    )
    negative: float = Field(
        1.0,
        ge=0,
        le=1,
        description="What a row's negative relevance to a unit is multiplied by: 1 keeps it, 0 drops it. That of "
        "`gradient`, whose sign is as good as its size, is always kept.",
    )
    components: dict[str, float] = Field(
        {}, description="omega by component, e.g. joint.pair: -0.25. Halves: hidden, residual, joint, product."
    )
    standardize: Standardize = Standardize()
    calibration: CalibrationSettings = CalibrationSettings()
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
            raise ValueError("expected auto, or at least one kernel with a weight other than 0, e.g. {token: 1}")
        if isinstance(match, dict) and not all(math.isfinite(weight) for weight in match.values()):
            raise ValueError("weights must be finite")
        return match

    @field_validator("components")
    @classmethod
    def _known_components(cls, components: dict[str, float]) -> dict[str, float]:
        unknown = [name for name in components if not COMPONENT.fullmatch(name)]
        if unknown:
            raise ValueError(
                f"unknown {unknown}; expected one of {'|'.join(get_args(Half))}, a dot, "
                f"and one of {'|'.join(get_args(Kind))}"
            )
        if not all(math.isfinite(omega) for omega in components.values()):
            raise ValueError("weights must be finite")
        return components

    def negative_of(self, kernel: str) -> float:
        """What negative relevance by a kernel is multiplied by."""
        return 1.0 if kernel == "gradient" else self.negative

    @property
    def provenance(self) -> str:
        """How the protocol was chosen, in words: the development results it was selected on, or that it was not."""
        if self.selected_on:
            return f"selected on {', '.join(self.selected_on)}"
        return NOT_SELECTED_OTHER if self.components else NOT_SELECTED

    def chosen_on(self, fingerprint: str) -> set[str]:
        """Targets of the runs with this fingerprint by which the protocol was selected."""
        return chosen_on({name: self.selected_runs.get(name, "") for name in self.selected_on or ()}, fingerprint)

    def fitted(self, array_names: Sequence[str], feature_settings: Mapping[str, Any]) -> Self:
        """This protocol with `match: auto` resolved, kernels in the order of `Match`, if the artifact can serve it.

        Raises:
            ProtocolError: kernels or sketches that the artifact lacks, feature settings other than required;
                all of them in one message.
        """
        match = self._resolved(array_names)
        needed = [f"relevance_{kernel}" for kernel in match]
        needed += [f"{half}_sketch" for half in halves_needed(self.components)]
        problems = [
            f"needs array {name!r}, the artifact has {list(array_names)}" for name in needed if name not in array_names
        ]
        for field, expected in self.requires.model_dump(exclude_none=True).items():
            found = feature_settings.get(field)
            if found != expected:
                problems.append(f"features.{field}: requires {expected!r}, the artifact was built with {found!r}")
        if problems:
            raise ProtocolError(
                f"protocol {self.name!r} does not fit the artifact: {'; '.join(problems)}; "
                "build an artifact with these settings, or choose another protocol"
            )
        return self.model_copy(update={"match": match})

    def _resolved(self, array_names: Sequence[str]) -> dict[Match, float]:
        if self.match == "auto":
            there: list[Match] = [kernel for kernel in get_args(Match) if f"relevance_{kernel}" in array_names]
            if "token" not in there:
                return {"pooled": 1.0}
            first: list[Match] = [kernel for kernel in there if kernel in ("token", "input")]
            if "gradient" in there:
                return dict.fromkeys(first, BESIDE_GRADIENT) | {"gradient": 1.0}
            beside = ("neighbour",) if "neighbour" in there else ("shift", "tilt")  # by what is trained
            return dict.fromkeys((*first, *(kernel for kernel in there if kernel in beside)), 1.0)
        return {kernel: self.match[kernel] for kernel in get_args(Match) if self.match.get(kernel)}


def chosen_on(runs: Mapping[str, str], fingerprint: str) -> set[str]:
    """Targets of the runs with this fingerprint, out of fingerprints by `environment/target`."""
    return {result.partition("/")[2] for result, theirs in runs.items() if theirs == fingerprint}


def default_protocol() -> ScoringProtocol:
    """The protocol that ships with the package."""
    with as_file(files("grasp.predict").joinpath("default.yaml")) as path:
        return load_protocol(path)


def as_protocol(protocol: "ScoringProtocol | Path | str | None") -> ScoringProtocol:
    """A protocol, its file, or the one that ships."""
    if protocol is None:
        return default_protocol()
    return protocol if isinstance(protocol, ScoringProtocol) else load_protocol(protocol)


def load_protocol(path: Path | str) -> ScoringProtocol:
    """Read a protocol from YAML (JSON is YAML too); every mismatch is in the message."""
    return validated_yaml(ScoringProtocol, path, "protocol", ProtocolError)


def save_protocol(protocol: ScoringProtocol, path: Path | str) -> None:
    """Write a protocol so that `load_protocol` gives it back: YAML, or JSON by its name; it appears only when whole."""
    target = Path(path)
    if target.suffix != ".json":
        write_yaml(protocol.model_dump(mode="json"), target)
        return
    with written_aside(target) as part:
        part.write_text(protocol.model_dump_json(indent=1) + "\n", encoding="utf-8")
