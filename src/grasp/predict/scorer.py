"""A protocol bound to an artifact: sums over a block of subsets, components, utilities.

Binding reads each relevance matrix and each sketch once or twice; then a block of subsets costs one sweep over what
is held in memory, or one pass over what is not.
Shape letters: B subsets, E units, T tasks.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, get_args

import numpy as np

from grasp.predict.blocks import SubsetBlock
from grasp.predict.combine import ComponentTable, Prediction, combine, dropped
from grasp.predict.families import Family
from grasp.predict.geometry import (
    Geometry,
    Half,
    Kind,
    SketchSums,
    SubsetMass,
    direct_sum,
    halves_needed,
    subset_relevance,
)
from grasp.predict.held import Kernel, Sketch, UnitSelection, pair_sums
from grasp.predict.labels import LabelColumn
from grasp.predict.protocol import ScoringProtocol
from grasp.predict.slices import LabelTable
from grasp.predict.source import F64, FeatureSource, checked_targets
from grasp.predict.standardize import (
    ComponentMoments,
    MomentsAccumulator,
    PairSums,
    has_closed_form,
    pair_moments,
    relevance_moments,
    self_moments,
)
from grasp.predict.weights import Weights


@dataclass(frozen=True, slots=True)
class CalibrationFamily:
    """The family that standardises; its stream is named `calibration`, apart from every evaluation family."""

    family: Family
    n_subsets: int = 256
    seed: int = 0
    labels: LabelColumn | None = None

    @classmethod
    def of(cls, protocol: ScoringProtocol, table: LabelTable | None = None) -> Self:
        """The protocol's own; `table` gives the labels of a family that needs them."""
        family = protocol.calibration.parsed
        labels = None if family.label is None or table is None else table.column(family.label, f"calibration {family}")
        return cls(family, protocol.calibration.n_subsets, protocol.calibration.seed, labels)

    def blocks(self, n_rows: int) -> Iterator[SubsetBlock]:
        """Draw it."""
        return self.family.draw(
            self.n_subsets, n_rows=n_rows, labels=self.labels, seed=self.seed, purpose="calibration"
        )

    def __str__(self) -> str:
        return f"{self.family}, {self.n_subsets} subsets, seed {self.seed}"


@dataclass(frozen=True, slots=True)
class SubsetSums:
    """Sums over the retained rows of B subsets with raw weights: all that a score depends on."""

    mass: SubsetMass
    task: Mapping[str, F64]  # (B, T) by kernel
    unit: Mapping[str, F64]  # (B, E) by kernel; empty unless units are scored
    sketch: Mapping[str, SketchSums]  # by half; joint is made from hidden and residual


@dataclass(frozen=True, slots=True)
class Level:
    """Tasks or units: kernels with a column each, and the moments of every component over the calibration family."""

    kernels: Mapping[str, Kernel]
    moments: Mapping[str, ComponentMoments]


@dataclass(frozen=True, slots=True)
class Scorer:
    """What `predict` and `slice_table` share; made by `prepare`."""

    protocol: ScoringProtocol
    units: UnitSelection
    n_rows: int
    task: Level
    unit: Level | None
    sketches: Mapping[str, Sketch]
    calibration: str

    @classmethod
    def prepare(
        cls,
        source: FeatureSource,
        protocol: ScoringProtocol,
        *,
        targets: Sequence[str] | None = None,
        per_unit: bool = False,
        calibration: CalibrationFamily | None = None,
        halves: Sequence[str] = (),
    ) -> Self:
        """Bind a protocol to an artifact.

        Args:
            halves: sketches wanted besides those of the protocol's components.
        Raises:
            ProtocolError: the artifact does not fit the protocol, or has no such target.
            SubsetError: the calibration family needs labels that were not given.
        """
        fitted = protocol.fitted(source.array_names, source.feature_settings)
        units = UnitSelection.of(source, checked_targets(source, targets))
        family = CalibrationFamily.of(fitted) if calibration is None else calibration
        sketches = {half: Sketch.of(source, half) for half in sorted({*halves_needed(fitted.components), *halves})}
        first = fitted.standardize.task == "mean_of_standardised"
        unit = None
        if per_unit or first:
            kernels = {one: Kernel.of_units(source, one, units, fitted.negative) for one in _kernels(fitted)}
            unit = Level(kernels, level_moments(fitted, kernels, {}, family, source.n_rows))
        std = unit.moments if unit is not None and first else {}
        kernels = {one: Kernel.of_tasks(source, one, units, fitted.negative, std.get(one)) for one in _kernels(fitted)}
        task = Level(kernels, level_moments(fitted, kernels, sketches, family, source.n_rows))
        if unit is not None:
            unit = Level(unit.kernels, {**task.moments, **unit.moments}) if per_unit else None
        return cls(fitted, units, source.n_rows, task, unit, sketches, str(family))

    def sums(self, weights: Weights) -> SubsetSums:
        """Sums of one block of subsets; memory: the block, and one block of rows."""
        return SubsetSums(
            mass=SubsetMass.of(weights),
            task=_kernel_sums(self.task.kernels, weights),
            unit={} if self.unit is None else _kernel_sums(self.unit.kernels, weights),
            sketch={half: sketch.sums(weights) for half, sketch in self.sketches.items()},
        )

    def whole(self) -> SubsetSums:
        """The corpus itself, as a block of one subset."""
        unit = {} if self.unit is None else self.unit.kernels
        return SubsetSums(
            mass=SubsetMass(np.array([float(self.n_rows)]), np.zeros(1), self.n_rows),
            task={name: kernel.rows.total_E[None] for name, kernel in self.task.kernels.items()},
            unit={name: kernel.rows.total_E[None] for name, kernel in unit.items()},
            sketch={half: sketch.totals.whole() for half, sketch in self.sketches.items()},
        )

    def score_tasks(self, sums: SubsetSums) -> tuple[ComponentTable, Prediction]:
        """Components and utility of tasks, (B, T). Source: eq:component-predictor."""
        return self._score(self.task, sums.task, sums)

    def score_units(self, sums: SubsetSums) -> tuple[ComponentTable, Prediction]:
        """Components and utility of units, (B, E), each standardised by its own A."""
        assert self.unit is not None
        return self._score(self.unit, sums.unit, sums)

    @property
    def dropped(self) -> tuple[str, ...]:
        """Components that do not vary over the calibration family, and hence contribute nothing."""
        return dropped(self.task.moments)

    def _score(self, level: Level, relevance: Mapping[str, F64], sums: SubsetSums) -> tuple[ComponentTable, Prediction]:
        table = components(self.protocol, level.kernels, self.sketches, relevance, sums)
        weights = _kernels(self.protocol)
        return table, combine(table, level.moments, match_weights=weights, omega=self.protocol.components)


def components(
    protocol: ScoringProtocol,
    kernels: Mapping[str, Kernel],
    sketches: Mapping[str, Sketch],
    relevance: Mapping[str, F64],
    sums: SubsetSums,
) -> ComponentTable:
    """Components of B subsets in natural units, for the protocol's side and weighting.

    Source: eq:grasp-subset-relevance, eq:ia-components.
    """
    side, weighting = protocol.side, protocol.weighting
    a = {
        name: subset_relevance(sum_BE, kernels[name].rows.total_E, sums.mass, side, weighting)
        for name, sum_BE in relevance.items()
    }
    halves: dict[str, Geometry] = {
        half: sums.sketch[half].geometry(sums.mass, sketches[half].totals, side, weighting)
        for half in halves_needed(protocol.components)
        if half in sketches
    }
    if {"hidden", "residual"} <= halves.keys():
        halves["joint"] = direct_sum(halves["hidden"], halves["residual"])
    return ComponentTable(a, {name: halves[h][kind] for name, (h, kind) in _named(protocol).items() if h in halves})


def level_moments(
    protocol: ScoringProtocol,
    kernels: Mapping[str, Kernel],
    sketches: Mapping[str, Sketch],
    family: CalibrationFamily,
    n_rows: int,
) -> dict[str, ComponentMoments]:
    """Moments of A, and of the geometry of `sketches`; drawn only where no closed form covers them."""
    exact = _closed_forms(protocol, kernels, sketches, family.family)
    wanted = {*kernels, *(name for name, (half, _) in _named(protocol).items() if sketches)}
    if exact.keys() >= wanted:
        return exact
    sampled = MomentsAccumulator()
    for weights in (block.weights for block in family.blocks(n_rows)):
        sums = SubsetSums(
            mass=SubsetMass.of(weights),
            task=_kernel_sums({k: v for k, v in kernels.items() if k not in exact}, weights),
            unit={},
            sketch={half: sketch.sums(weights) for half, sketch in sketches.items()},
        )
        table = components(protocol, kernels, sketches, sums.task, sums)
        sampled.add({**table.relevance, **table.geometry})
    return sampled.moments() | exact


def _closed_forms(
    protocol: ScoringProtocol, kernels: Mapping[str, Kernel], sketches: Mapping[str, Sketch], family: Family
) -> dict[str, ComponentMoments]:
    if not has_closed_form(family):
        return {}
    side, weighting = protocol.side, protocol.weighting
    exact = {name: relevance_moments(kernel.rows, family, side, weighting) for name, kernel in kernels.items()}
    pairs: dict[str, PairSums] = {}
    for name, (half, kind) in _named(protocol).items():
        if kind == "self" and half in sketches:
            exact[name] = self_moments(sketches[half].norms, family, side, weighting)
        elif sketches:
            if half not in pairs:
                pairs[half] = pair_sums([sketches[one] for one in halves_needed({name: 1.0})])
            exact[name] = pair_moments(pairs[half], kind, family, side, weighting)
    return exact


def _kernel_sums(kernels: Mapping[str, Kernel], weights: Weights) -> dict[str, F64]:
    return {name: kernel.held.sums(weights) for name, kernel in kernels.items()}


def _kernels(protocol: ScoringProtocol) -> dict[str, float]:
    """Kernels of a fitted protocol and their weights."""
    assert isinstance(protocol.match, dict)
    return {str(kernel): weight for kernel, weight in protocol.match.items()}


def _named(protocol: ScoringProtocol) -> dict[str, tuple[Half, Kind]]:
    """`joint.pair` as ("joint", "pair"); the names were checked when the protocol was read."""
    halves: dict[str, Half] = {str(half): half for half in get_args(Half)}
    kinds: dict[str, Kind] = {str(kind): kind for kind in get_args(Kind)}
    parts: Iterable[tuple[str, list[str]]] = ((name, name.split(".")) for name in protocol.components)
    return {name: (halves[half], kinds[kind]) for name, (half, kind) in parts}
