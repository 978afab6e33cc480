"""Finite families of candidate protocols, which `grasp calibrate` selects from, and the controls of the paper.

Start with `ProtocolFamily`, which is read from YAML, and `ProtocolFamily.members`, which lists its candidates. A
`Control` (an ablation) removes terms of a predictor: relevance, or some geometric components (`<sketch>.<kind>`); its
remaining weights are selected on development runs like those of the full predictor. `subsets_for` gives the number of
retrained subsets that a family requires.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator
from scipy.special import ndtri

from grasp.errors import ProtocolError, SettingsError
from grasp.paper.protocol import COMPONENT, InteractionProtocol, Standardize
from grasp.paper.subset_sums import Kind, SketchName, required_sketches
from grasp.predict.scoring_rule import KernelName, ScoringProtocol
from grasp.predict.weights import Side
from grasp.runs.predictions import Weighting
from grasp.settings import Settings
from grasp.yaml_files import read_yaml, validated

TaskStandard = Literal["mean_relevance", "mean_of_standardised"]
Criterion = Literal["task_rho", "mean_lds"]
FAMILY_FILE = Path(__file__).with_name("family.yaml")  # the built-in family, with comments
MAX_MEMBERS = 20_000
DELTA = 0.05  # probability that the bound of any member fails
# Largest acceptable distance between the mean rho of an uninformative protocol and its lower confidence bound.
MAX_HALF_WIDTH = 0.6


@dataclass(frozen=True, slots=True)
class ComponentSettings:
    """The settings of a protocol that determine the values of its components, as opposed to their weights.

    Component values are computed once for all candidates with the same settings.
    """

    side: Side
    weighting: Weighting
    task: TaskStandard
    negative: float = 1.0  # factor of negative relevance

    def protocol(self, kernels: Sequence[KernelName], components: Sequence[str]) -> InteractionProtocol:
        """Return a protocol with these settings and these components, all with weight 1."""
        return InteractionProtocol(
            name="parts",
            side=self.side,
            weighting=self.weighting,
            match=dict.fromkeys(kernels, 1.0) or "auto",
            negative=self.negative,
            components=dict.fromkeys(components, 1.0),
            standardize=Standardize(task=self.task),
        )


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate for selection: a protocol, or a control (then `match` may be empty, or pairs shuffled)."""

    settings: ComponentSettings
    match: tuple[tuple[KernelName, float], ...]  # kernels of the relevance, with their weights
    components: tuple[tuple[str, float], ...]  # geometric components such as `joint.pair`, with their weights omega
    shuffled: bool = False

    @property
    def name(self) -> str:
        """Name that lists all settings and weights."""
        kernels = "+".join(f"{kernel}" if weight == 1 else f"{weight:g} {kernel}" for kernel, weight in self.match)
        if kernels and self.settings.negative != 1:
            kernels += f" (negative x {self.settings.negative:g})"
        geometry = ", ".join(f"{omega:+g} {name}" for name, omega in self.components) or "no geometry"
        parts = [self.settings.side, self.settings.weighting, kernels or "no relevance", geometry, self.settings.task]
        return " | ".join(parts + ["shuffled"] * self.shuffled)

    def protocol(self, name: str, **fields: Any) -> ScoringProtocol:
        """Return the candidate as a protocol with a name and further fields.

        Raises:
            ProtocolError: it is a control without relevance, or with shuffled pairs.
        """
        if not self.match or self.shuffled:
            raise ProtocolError(f"{self.name}: a control cannot be frozen as a protocol; select from a full family")
        with_settings = self.settings.protocol([kernel for kernel, _ in self.match], ())
        return with_settings.model_copy(
            update={"name": name, "match": dict(self.match), "components": dict(self.components)} | fields
        )


@dataclass(frozen=True, slots=True)
class Control:
    """A control of the paper: the terms of the full predictor that remain."""

    name: str
    relevance: bool = True
    kinds: tuple[str, ...] | None = None  # kinds of components that remain (raw, self, pair, cent); None: all
    without: Literal["", "hidden", "residual"] = ""  # sketch that is removed, with all sketches that contain it
    shuffled: bool = False

    def components(self, full: Sequence[str]) -> tuple[str, ...]:
        """Return the remaining components of the full predictor, e.g. `residual.pair` of `joint.raw`."""
        remaining: dict[str, None] = {}
        other = {"": "", "hidden": "residual", "residual": "hidden"}[self.without]
        for sketch_name, kind in (component.split(".") for component in full):
            kinds: tuple[str, ...] = (kind,)
            if self.kinds is not None and kind not in self.kinds:
                # raw = self + pair: removing one of the two leaves the other
                kinds = self.kinds if kind == "raw" and len(self.kinds) == 1 else ()
            if not other or sketch_name in ("joint", other):
                remaining |= dict.fromkeys(f"{other or sketch_name}.{left}" for left in kinds)
        return tuple(remaining)


CONTROLS = (
    Control("full"),
    Control("additive", kinds=()),
    Control("additive-self-norm", kinds=("self",)),  # still additive, with a norm
    Control("pair-only", relevance=False, kinds=("pair",)),  # cross-example geometry without relevance
    Control("pair-shuffled", shuffled=True),  # all, with similarities assigned to other pairs (`ShuffledPairs`)
    Control("without-hidden-geometry", without="hidden"),  # the product sketch contains hidden states too
    Control("without-residual-geometry", without="residual"),
    # relevance is residual match x hidden match; an artifact only has the product, so both are removed
    Control("without-residual-alignment", relevance=False, without="residual"),
    Control("without-self", kinds=("pair",)),  # K_raw is replaced by K_pair
)


class ProtocolFamily(Settings):
    """Candidate protocols of `grasp calibrate`: every combination of the lists below is one protocol."""

    criterion: Criterion = Field(
        "task_rho", description="What the bound is of: rho of the task's utility, or mean rho of its units'."
    )
    sides: tuple[Side, ...] = Field(("retained",), min_length=1, description="Sides scored.")
    weightings: tuple[Weighting, ...] = Field(("mean",), min_length=1, description="count, mean.")
    matches: tuple[dict[KernelName, float], ...] = Field(
        ({"output_layer": 1.0}, {"pooled": 1.0}, {"output_layer": 1.0, "pooled": 1.0}),
        min_length=1,
        description="Kernels' weights.",
    )
    negatives: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field(
        (1.0,), min_length=1, description="What negative relevance is multiplied by."
    )
    standardize: tuple[TaskStandard, ...] = Field(
        ("mean_relevance",), min_length=1, description="How a task's relevance is standardised."
    )
    components: tuple[tuple[str, ...], ...] = Field(((),), min_length=1, description="Sets of geometric components.")
    omegas: tuple[float, ...] = Field(
        (-0.5, -0.25, -0.1, 0.1, 0.25), description="Weights tried for every component of a set, in all combinations."
    )
    calibration_subsets: int = Field(256, ge=2, description="Subsets drawn to standardise by, per environment.")
    frozen_calibration: str = Field(
        "same",
        description="Calibration family written into the selected protocol; same: that of the environments, or "
        "uniform:0.5 where they differ.",
    )
    relevance: bool = Field(True, description="False leaves relevance out: for controls.")
    shuffled: bool = Field(False, description="True takes pair geometry from shuffled pairs: for controls.")

    @field_validator("components")
    @classmethod
    def _known_components(cls, sets: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
        unknown = sorted({name for names in sets for name in names if not COMPONENT.fullmatch(name)})
        if unknown:
            raise ValueError(
                f"unknown {unknown}; expected {'|'.join(get_args(SketchName))}, a dot, {'|'.join(get_args(Kind))}"
            )
        return sets

    def members(self, array_names: Sequence[str]) -> tuple[tuple[Candidate, ...], int]:
        """Return the candidates for which an artifact has all arrays, without duplicates, and the number of others.

        Raises:
            ProtocolError: more than MAX_MEMBERS candidates.
        """
        matches = [tuple(sorted(match.items())) for match in self.matches] if self.relevance else [()]
        weighted_components = [
            tuple(zip(names, omegas, strict=True))
            for names in dict.fromkeys(self.components)
            for omegas in product([omega for omega in self.omegas if omega], repeat=len(names))
        ]
        negatives = self.negatives if self.relevance else (1.0,)
        all_settings = [
            ComponentSettings(*values) for values in product(self.sides, self.weightings, self.standardize, negatives)
        ]
        count = len(all_settings) * len(matches) * len(weighted_components)
        if count > MAX_MEMBERS:
            raise ProtocolError(f"family: {count:,} protocols, expected at most {MAX_MEMBERS:,}; shorten the lists")
        candidates = dict.fromkeys(
            Candidate(settings, match, components, self.shuffled)
            for settings in all_settings
            for match in matches
            for components in weighted_components
            if match or components
        )
        computable = tuple(candidate for candidate in candidates if needed_arrays(candidate) <= set(array_names))
        return computable, len(candidates) - len(computable)

    @property
    def size(self) -> int:
        """Number of protocols if all arrays are available."""
        kernels = dict.fromkeys(f"relevance_{kernel}" for match in self.matches for kernel in match)
        arrays = [*kernels, *(f"{name}_sketch" for name in get_args(SketchName))]
        computable, n_others = self.members(arrays)
        return len(computable) + n_others

    def restricted(self, control: Control) -> "ProtocolFamily":
        """Return the family of a control: the remaining components of each set, without duplicates."""
        sets = dict.fromkeys(control.components(names) for names in self.components)
        return self.model_copy(
            update={
                "components": tuple(sets),
                "relevance": self.relevance and control.relevance,
                "shuffled": control.shuffled,
            }
        )


def needed_arrays(candidate: Candidate) -> set[str]:
    """Return the names of the arrays that a candidate reads."""
    kernels = {f"relevance_{kernel}" for kernel, _ in candidate.match}
    return kernels | {f"{name}_sketch" for name in required_sketches(name for name, _ in candidate.components)}


def default_family() -> ProtocolFamily:
    """Load the built-in family."""
    return load_family(FAMILY_FILE)


def load_family(path: ProtocolFamily | Path | str) -> ProtocolFamily:
    """Read a family from YAML; return a `ProtocolFamily` as it is. An error message lists every problem."""
    if isinstance(path, ProtocolFamily):
        return path
    try:
        data = read_yaml(Path(path))
    except SettingsError as err:
        raise ProtocolError(str(err)) from err
    return validated(ProtocolFamily, data, f"family {path}", ProtocolError)


def subsets_for(n_protocols: int) -> int:
    """Return the number of subsets that is required to select among `n_protocols` protocols.

    The rho of an uninformative predictor on B subsets has the standard error 1 / sqrt(B - 1), and the lower confidence
    bound of one of K protocols is z_(1 - DELTA/K) standard errors below its mean (Bonferroni). B is the smallest number
    for which this distance is at most MAX_HALF_WIDTH.
    """
    return 1 + math.ceil((float(ndtri(1 - DELTA / n_protocols)) / MAX_HALF_WIDTH) ** 2)
