"""Scoring protocols with interactions between rows, or that do not average; `PAPER` is the protocol of the paper.

Start with `InteractionProtocol`, the settings of such a protocol. Its *components* are quadratic functions of a subset,
named `<sketch>.<kind>` (`subset_sums`), which enter a prediction with weights omega (`terms`).
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, get_args

from pydantic import Field, field_validator

from grasp.artifact.reader import ArtifactReader
from grasp.errors import ProtocolError, SubsetError
from grasp.paper.subset_sums import Kind, SketchName, required_sketches
from grasp.predict.families import Family, parse_family
from grasp.predict.predictor import Predictor, UnitSelection
from grasp.predict.scoring_rule import RegisteredProtocol, ScoringProtocol, kernel_weights
from grasp.predict.weights import Side
from grasp.runs.predictions import Weighting
from grasp.settings import Settings
from grasp.yaml_files import validated

COMPONENT = re.compile(rf"({'|'.join(get_args(SketchName))})\.({'|'.join(get_args(Kind))})")
DEFAULT_CALIBRATION = "uniform:0.5"
# Settings that only this package has, with the values that mean "no interaction"; a protocol file may contain them.
STANDARDS = {"task": "mean_relevance", "unit": "own_relevance"}
NO_INTERACTION = {"side": "retained", "weighting": "mean", "components": {}, "standardize": STANDARDS}
OWN_SETTINGS = {*NO_INTERACTION, "calibration"}


class Standardize(Settings):
    """Order of averaging and standardization; over the rows, or with geometry over the calibration family."""

    task: Literal["mean_relevance", "mean_of_standardised"] = Field(
        "mean_relevance",
        description="mean_relevance: a task's relevance is the mean over its units. mean_of_standardised: each unit's "
        "is divided by its own standard deviation first.",
    )
    unit: Literal["own_relevance"] = Field("own_relevance", description="A unit is scored by its own relevance.")


class CalibrationSettings(Settings):
    """The family of subsets whose moments standardize the geometry; never the subsets that are evaluated."""

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


class InteractionProtocol(RegisteredProtocol):
    """A scoring protocol with interactions between rows, another side, or another weighting.

    Source: eq:component-predictor. omega carries the sign; a penalty is a negative omega.
    """

    kernels: ClassVar[tuple[str, ...]] = ("pooled",)
    feature_defaults: ClassVar[Mapping[str, Any]] = {
        "positions": "tail:32",
        "summary_positions": "tail:32",
        "sample_rows": 65_536,
    }

    task: Literal["mean"] = Field("mean", description="Score of a row for a task: mean relevance to its questions.")
    side: Side = Field("retained", description="Rows that are scored; omitted flips the sign of A.")
    weighting: Weighting = Field("mean", description="count: w_i; mean: w_i / sum w.")
    components: dict[str, float] = Field(
        {}, description="omega by component, e.g. joint.pair: -0.25. Sketches: hidden, residual, joint, product."
    )
    standardize: Standardize = Standardize()
    calibration: CalibrationSettings = CalibrationSettings()

    @field_validator("components")
    @classmethod
    def _known_components(cls, components: dict[str, float]) -> dict[str, float]:
        unknown = [name for name in components if not COMPONENT.fullmatch(name)]
        if unknown:
            raise ValueError(
                f"unknown {unknown}; expected one of {'|'.join(get_args(SketchName))}, a dot, "
                f"and one of {'|'.join(get_args(Kind))}"
            )
        if not all(math.isfinite(omega) for omega in components.values()):
            raise ValueError("weights must be finite")
        return components

    @property
    def is_additive(self) -> bool:  # type: ignore[override]
        """Whether the change of a subset is the mean effect of its rows."""
        return (self.components, self.side, self.weighting) == ({}, "retained", "mean")

    @property
    def arrays(self) -> tuple[str, ...]:
        """Arrays of an artifact that a resolved protocol reads."""
        kernels = tuple(f"relevance_{kernel}" for kernel in kernel_weights(self))
        return (*kernels, *(f"{name}_sketch" for name in required_sketches(self.components)))

    @property
    def further_terms(self) -> str:  # type: ignore[override]
        """The geometry terms as text, for `description`."""
        return "".join(f", {omega:+g} {name}" for name, omega in self.components.items())

    @property
    def additive(self) -> Self:
        """The protocol by which rows are ranked and selected: without geometry, the mean of the retained rows."""
        return self.model_copy(update={"components": {}, "side": "retained", "weighting": "mean"})

    def for_runs(self, family: str | None) -> Self:
        """Return the protocol with a calibration family of the same kind as the family of the runs."""
        calibration = self.calibration.model_copy(update={"family": family or DEFAULT_CALIBRATION})
        return self.model_copy(update={"calibration": calibration})

    @classmethod
    def built_in(cls) -> Self:
        """Return the protocol of the paper.

        The paper: eq:grasp-score on pooled relevance, plus the two parts of K_raw in eq:ia-components, combined by
        eq:component-predictor. The paper selects omega on its development environments without reporting it; -0.25 was
        selected on ours (experiments/lds_main/protocol.yaml). `grasp calibrate` selects omega on your own runs.
        """
        return cls(name="paper", match={"pooled": 1.0}, components={"joint.self": -0.25, "joint.pair": -0.25})

    @classmethod
    def parse(cls, settings: Mapping[str, Any], location: str) -> ScoringProtocol | None:
        """Create a protocol from the settings of a file; None if it has no setting of this package.

        Settings that ask for no interaction make an additive protocol.

        Raises:
            ProtocolError: invalid settings.
        """
        if not settings.keys() & OWN_SETTINGS:
            return None
        if any(name in settings and settings[name] != neutral for name, neutral in NO_INTERACTION.items()):
            return validated(cls, settings, location, ProtocolError)
        shared = {name: value for name, value in settings.items() if name not in OWN_SETTINGS}
        return validated(ScoringProtocol, shared, location, ProtocolError)

    def bind(
        self,
        artifact: ArtifactReader,
        units: UnitSelection,
        *,
        sketches: Sequence[str],
        per_unit: bool,
    ) -> Predictor:
        """Create the predictor of a resolved protocol; see `Predictor.from_artifact` for the arguments."""
        from grasp.paper.interaction_predictor import bind  # noqa: PLC0415 - it imports this module

        return bind(artifact, self, units, sketches=sketches, per_unit=per_unit)


PAPER = InteractionProtocol.built_in()
