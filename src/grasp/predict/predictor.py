"""The one predictor: relevance once, added up over a subset.

    effect_i    the row's relevance to the target, kernels added, mean 0 and standard deviation 1 over the rows
    change(S)   sum_i w_i effect_i / sum_i w_i

is all of it for a protocol without geometry that scores the retained rows by their mean, where all of them have one
weight. The change is against the whole corpus: 0 is the corpus, positive is better. Its unit, *effect size*, does not
depend on the question, and a slice's mean effect explains its rank: dropping a share p of the rows with the mean effect
m changes -p / (1 - p) m.

Repetition takes a part. Rows count by the law of exposure (`weights.Exposure`), x_i in place of w_i, and together
less than as many rows that are seen once: worth(S) = sum_i x_i / rows kept. Any new row is worth b effects, so

    change(S) = worth(S) (sum_i x_i effect_i / sum_i x_i + b) - b

b is small against what a row of the right kind is worth, and decides where a few rows are seen very often.

The other choices of a protocol are the same algebra. With s(S) = A of eq:grasp-subset-relevance for its side and
weighting, change(S) = gain (s(S) - s(corpus)). `count` adds rows up instead of averaging them, so there the relevance
counts from its own zero (`offset`), and the sum is divided by the rows of the corpus, which keeps the unit. Geometry
adds its terms, and the standard deviations of its family are the unit then (`geometry_terms`).
Source: eq:component-predictor, eq:grasp-subset-relevance, eq:method-additive.
Shape letters: B subsets, N rows, E units, T targets, G slices.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from grasp.artifact.reader import ArtifactReader
from grasp.geometry.standardize import ComponentMoments, RowMoments
from grasp.geometry.sums import SketchSums, SubsetMass, halves_needed, subset_relevance
from grasp.geometry.terms import CalibrationFamily, GeometryTerms, Sketch, family_moments
from grasp.predict.protocol import ScoringProtocol, default_protocol
from grasp.predict.relevance import Kernel, UnitSelection, effects
from grasp.predict.row_arrays import F32, F64, checked_targets, kept
from grasp.predict.row_sums import RowSums
from grasp.predict.weights import ANY_TEXT, Exposure, Weights, squared, weight_sums

EFFECT_SIZE = "effect size"
REPETITION = "repetition"  # beside the kernels, as a part of a change


@dataclass(frozen=True, slots=True)
class SubsetSums:
    """All that a prediction of a subset depends on: sums over the rows that it keeps, with their raw weights."""

    mass: SubsetMass
    square_B: F64  # sum of w_i^2
    effect_BT: F64
    sketch: Mapping[str, SketchSums]

    def from_whole(self, corpus: "SubsetSums", weight: float, exposure: Exposure | None) -> "SubsetSums":
        """The corpus with the rows of each subset at another weight: 0 drops them, 2 doubles them.

        Weights are 1 + step there, so squared norms change by (1 + step)^2 - 1. For subsets with weights 0 and 1.
        """
        size_B, n_rows = self.mass.retained_B, self.mass.n_rows
        weight_B, kept_B = n_rows + (weight - 1.0) * size_B, n_rows - (weight == 0.0) * size_B
        counted_B = np.full(len(size_B), weight)
        if exposure is not None and weight > 0.0:
            counted_B = exposure.relative(weight, exposure.base(kept_B, n_rows) / np.maximum(weight_B, 1.0))
        step_B = counted_B - 1.0
        square_B = counted_B**2 - 1.0
        step_B1 = step_B[:, None]
        return SubsetSums(
            SubsetMass(n_rows + step_B * size_B, np.abs(step_B) * size_B, n_rows, weight_B, kept_B),
            n_rows + square_B * size_B,
            corpus.effect_BT + step_B1 * self.effect_BT,
            {
                half: SketchSums(
                    corpus.sketch[half].total_BD + step_B1 * part.total_BD,
                    corpus.sketch[half].norm_B + step_B * part.norm_B,
                    corpus.sketch[half].square_norm_B + square_B * part.norm_B,
                )
                for half, part in self.sketch.items()
            },
        )

    def cumulated(self) -> "SubsetSums":
        """Sums of the first subset, of the first two together, and so on; they share no row, weights are 1."""
        kept_B, n_rows = np.cumsum(self.mass.retained_B), self.mass.n_rows
        sketch = {
            half: SketchSums(np.cumsum(part.total_BD, axis=0), np.cumsum(part.norm_B), np.cumsum(part.square_norm_B))
            for half, part in self.sketch.items()
        }
        mass = SubsetMass.plain(kept_B, n_rows)
        return SubsetSums(mass, np.cumsum(self.square_B), np.cumsum(self.effect_BT, axis=0), sketch)


@dataclass(frozen=True, slots=True)
class Level:
    """What is added up over rows, a column each: the tasks, or the units."""

    effects: RowSums  # of every row, mean 0 and standard deviation 1 over the rows of the artifact
    spread: ComponentMoments  # what both were before
    shares: Mapping[str, F64]  # by kernel: what it adds to the effect, as slope / sd of the sum
    means: Mapping[str, F64]  # by kernel: over the rows, as it is counted
    gain_C: F64  # what a difference of A, made of effects, is multiplied by to be a change
    offset_C: F64  # added to every effect before rows are summed: under `count` their zero is that of the relevance
    whole_C: F64  # level of the corpus: what its own prediction is, before a change is taken
    base_C: F64  # what any new row is worth, in effects of the column


@dataclass(frozen=True, slots=True)
class Predictor:
    """A protocol bound to an artifact.

    Made by `of`, which reads each relevance matrix once, and twice for units; the next question of an opened artifact
    finds the effects of an additive protocol kept.
    """

    protocol: ScoringProtocol
    units: UnitSelection
    n_rows: int
    task: Level
    unit_level: Level | None
    geometry: GeometryTerms | None
    sketches: Mapping[str, Sketch]
    unit: str  # what a change is measured in
    kernel_dropped: tuple[str, ...]
    unit_scales: Mapping[str, F64 | float]  # by kernel: what units are multiplied by before a task takes their mean
    task_kernels: Mapping[str, Kernel] = field(repr=False)  # empty unless asked for
    exposure: Exposure | None  # how weights count; None: as they are

    @classmethod
    def of(
        cls,
        artifact: ArtifactReader,
        protocol: ScoringProtocol | None = None,
        targets: Sequence[str] | None = None,
        *,
        per_unit: bool = False,
        sketches: Sequence[str] = (),
        components: bool = False,
        units: UnitSelection | None = None,
        exposure: Exposure | None = None,
    ) -> Self:
        """Bind a protocol to an artifact.

        Args:
            protocol: None: the one that ships.
            targets: None: all.
            per_unit: prepare for `unit_change`.
            sketches: halves wanted besides those of the protocol's geometry.
            components: keep the kernels apart, for `kernel_parts`.
            units: other columns than all units of the targets.
            exposure: of a training budget; None: of no budget. Only an additive protocol that scores the retained rows
                by their mean counts weights by it.
        Raises:
            ProtocolError: the artifact does not fit the protocol, or has no such target.
        """
        fitted = (protocol or default_protocol()).fitted(artifact.array_names, artifact.feature_settings)
        selected = units or UnitSelection.of(artifact, checked_targets(artifact, targets))
        wanted = sorted({*halves_needed(fitted.components), *sketches})
        held = {half: Sketch.of(artifact, half) for half in wanted}
        bends = (fitted.side, fitted.weighting) == ("retained", "mean") and not fitted.components
        law = (exposure or Exposure()) if bends else None
        if fitted.components or per_unit or components or units is not None:
            bound = cls._bound(artifact, fitted, selected, held, per_unit=per_unit, components=components)
            return replace(bound, exposure=law)
        key = "relevance", fitted.model_dump_json(), selected.targets
        n_bytes = 4 * artifact.n_rows * len(selected.targets)
        bound = kept(artifact, key, n_bytes, lambda: cls._bound(artifact, fitted, selected, {}))
        own = replace(bound.task, effects=RowSums.over(bound.effect_NT))  # which packs, and adds up, for itself
        return replace(bound, task=own, sketches=held, exposure=law)

    @classmethod
    def _bound(
        cls,
        artifact: ArtifactReader,
        fitted: ScoringProtocol,
        selected: UnitSelection,
        held: Mapping[str, Sketch],
        *,
        per_unit: bool = False,
        components: bool = False,
    ) -> Self:
        """Read the relevance, and add its kernels up."""
        family = CalibrationFamily.of(fitted.calibration, artifact) if fitted.components else None
        geometry = None if family is None else GeometryTerms.of(artifact, fitted, held, family)
        first = fitted.standardize.task == "mean_of_standardised"
        names = kernel_weights(fitted)
        spreads = _spreads(fitted, family, artifact.n_rows)
        unit_kernels: dict[str, Kernel] = {}
        if per_unit or first:
            unit_kernels = {one: Kernel.of_units(artifact, one, selected, fitted.negative_of(one)) for one in names}
        unit_spread = spreads(unit_kernels)
        scales: dict[str, F64 | float] = {one: unit_spread[one].inverse_E if first else 1.0 for one in names}
        kernels = {one: Kernel.of_tasks(artifact, one, selected, fitted.negative_of(one), scales[one]) for one in names}
        spread = spreads(kernels)
        unit_level = _level(fitted, unit_kernels, unit_spread, geometry, None) if per_unit else None
        if unit_level is not None:
            unit_level = replace(unit_level, base_C=unit_level.base_C * _of_tasks(unit_level, selected))
        some = next(iter(kernels.values())).held.held_NC
        assert some is not None
        return cls(
            protocol=fitted,
            units=selected,
            n_rows=artifact.n_rows,
            task=_level(fitted, kernels, spread, geometry, np.empty_like(some) if components else some),
            unit_level=unit_level,
            geometry=geometry,
            sketches=held,
            unit=EFFECT_SIZE if family is None else f"standard deviations over {family}",
            kernel_dropped=tuple(name for name, one in spread.items() if not one.varies_E.any()),
            unit_scales=scales,
            task_kernels=kernels if components else {},
            exposure=None,
        )

    @property
    def targets(self) -> tuple[str, ...]:
        return self.units.targets

    @property
    def additive(self) -> bool:
        """Whether the protocol has no geometry."""
        return self.geometry is None

    @property
    def effect_NT(self) -> F32:  # noqa: N802 - a shape suffix
        """The additive part of every row: mean 0, standard deviation 1 over the rows of the artifact."""
        held_NT = self.task.effects.held_NC
        assert held_NT is not None
        return held_NT

    @property
    def dropped(self) -> tuple[str, ...]:
        """Kernels and components that do not vary, and hence contribute nothing."""
        return (*self.kernel_dropped, *(() if self.geometry is None else self.geometry.dropped))

    @property
    def scored_by(self) -> str:
        """The protocol in words."""
        protocol = self.protocol
        kernels = " + ".join(
            kernel if weight == 1 else f"{weight:g} {kernel}" for kernel, weight in kernel_weights(protocol).items()
        )
        less = any(protocol.negative_of(kernel) != 1 for kernel in kernel_weights(protocol))
        negative = f", negative relevance times {protocol.negative:g}" if less else ""
        geometry = "".join(f", {omega:+g} {name}" for name, omega in protocol.components.items())
        results = len(protocol.selected_on or ())
        chosen = f"selected on {results} development results" if results else "not selected on development results"
        return f"protocol {protocol.name} ({kernels}{negative}{geometry}; {chosen})"

    @property
    def provenance(self) -> str:
        """Unit and protocol of a change in one line."""
        return f"{self.scale}; {self.scored_by}"

    @property
    def scale(self) -> str:
        """What a change is, in words."""
        return f"change against the whole corpus in {self.unit}: 0 = the corpus, higher is better"

    # ------------------------------------------------------------------------------------------ prediction

    def sums(self, weights: Weights, halves: Collection[str] | None = None) -> SubsetSums:
        """Sums of one block of subsets.

        Args:
            halves: sketches that are summed; None: all that the predictor was made with.
        """
        chosen, counted = self.sketches if halves is None else halves, self.counted(weights)
        sketch = {half: sketch.sums(counted) for half, sketch in self.sketches.items() if half in chosen}
        mass = SubsetMass.of(weights)
        if counted is not weights:
            retained_B, omitted_B = weight_sums(counted)
            mass = replace(mass, retained_B=retained_B, omitted_B=omitted_B)
        square_B = weight_sums(squared(counted))[0]
        return SubsetSums(mass, square_B, self.task.effects.sums(counted), sketch)

    def counted(self, weights: Weights) -> Weights:
        """What every row counts against a row of the weight 1."""
        return weights if self.exposure is None else self.exposure.of(weights)

    def whole(self) -> SubsetSums:
        """The corpus itself, as a block of one subset."""
        sketch = {half: sketch.totals.whole() for half, sketch in self.sketches.items()}
        mass = SubsetMass.whole(self.n_rows)
        return SubsetSums(mass, mass.retained_B, np.zeros((1, len(self.targets))), sketch)

    def change_of(self, sums: SubsetSums) -> F64:
        """Predicted change of utility against the whole corpus, (B, T); positive is better."""
        additive_BT = self.task.gain_C * self.relative(sums.effect_BT, self.task.offset_C, sums.mass, self.task.base_C)
        return additive_BT + self.geometry_change(sums)[:, None]

    def change(self, weights: Weights) -> F64:
        """The same for subsets given by their weights."""
        return self.change_of(self.sums(weights, halves_needed(self.protocol.components)))

    def unit_change(self, weights: Weights, sums: SubsetSums) -> F64:
        """The same for every unit, by its own relevance, (B, E).

        Args:
            sums: of the same subsets.
        """
        level = self.unit_level
        assert level is not None
        sum_BE = level.effects.sums(self.counted(weights))
        additive_BE = level.gain_C * self.relative(sum_BE, level.offset_C, sums.mass, level.base_C)
        return additive_BE + self.geometry_change(sums)[:, None]

    def relative(self, sum_BC: F64, offset_C: F64, mass: SubsetMass, base_C: F64 | float = 0.0) -> F64:
        """A of subsets minus A of the corpus, (B, C), for the protocol's side and weighting.

        Args:
            sum_BC: of values that add up to 0 over the corpus.
            offset_C: what is added to each of these values.
            base_C: what any new row is worth in the unit of the values; repetition takes its part of both.
        """
        side, weighting, total_C = self.protocol.side, self.protocol.weighting, self.n_rows * offset_C
        sum_BC = sum_BC + np.outer(mass.retained_B, offset_C)
        whole_1C = subset_relevance(total_C[None], total_C, SubsetMass.whole(self.n_rows), side, weighting)
        change_BC = subset_relevance(sum_BC, total_C, mass, side, weighting) - whole_1C
        worth_B1 = mass.worth(self.exposure)[:, None]
        return np.asarray(worth_B1 * change_BC - (1.0 - worth_B1) * base_C)

    def geometry_change(self, sums: SubsetSums) -> F64:
        """What geometry adds to a change, the same for every target, (B,)."""
        if self.geometry is None:
            return np.zeros(len(sums.mass.retained_B))
        return np.asarray(sum(self.geometry.parts(sums.sketch, sums.mass).values()))

    def kernel_parts(self, weights: Weights, mass: SubsetMass) -> dict[str, F64]:
        """What each kernel adds to a change, (B, T), and what repetition takes of what any row is worth.

        They add up to its additive part.
        """
        parts, counted = dict[str, F64](), self.counted(weights)
        for name, kernel in self.task_kernels.items():
            share_T, mean_T = self.task.shares[name], self.task.means[name]
            sum_BT = share_T * (kernel.held.sums(counted) - np.outer(mass.retained_B, mean_T))
            offset_T = share_T * mean_T if self.protocol.weighting == "count" else np.zeros_like(share_T)
            parts[name] = self.task.gain_C * self.relative(sum_BT, offset_T, mass)
        if self.exposure is not None:
            parts[REPETITION] = np.outer(mass.worth(self.exposure) - 1.0, self.task.base_C)
        return parts


def kernel_weights(protocol: ScoringProtocol) -> dict[str, float]:
    """Kernels of a fitted protocol and their weights."""
    assert isinstance(protocol.match, dict)
    return {str(kernel): weight for kernel, weight in protocol.match.items()}


def _spreads(
    protocol: ScoringProtocol, family: CalibrationFamily | None, n_rows: int
) -> Callable[[Mapping[str, Kernel]], Mapping[str, ComponentMoments]]:
    """What brings kernels to one scale: their spread over the rows, or, with geometry, that of A over the family."""
    if family is None:
        return lambda kernels: {name: kernel.rows.spread for name, kernel in kernels.items()}
    return lambda kernels: family_moments(protocol, kernels, {}, family, n_rows) if kernels else {}


def _level(
    protocol: ScoringProtocol,
    kernels: Mapping[str, Kernel],
    spread: Mapping[str, ComponentMoments],
    geometry: GeometryTerms | None,
    held_NC: F32 | None,
) -> Level:
    slopes = {name: weight * spread[name].inverse_E for name, weight in kernel_weights(protocol).items()}
    held, before = effects(kernels, slopes, held_NC)
    rows = next(iter(kernels.values())).rows
    counts, zero_C = protocol.weighting == "count", before.mean_E * before.inverse_E
    # A of the corpus is that of its mean row, N times under `count`. On the omitted side `mean` has no value for
    # nothing: that of a random part stands in, which changes nothing.
    sign = 1.0 if protocol.side == "retained" else 0.0 if counts else -1.0
    if geometry is None:
        gain_C = np.full(len(zero_C), 1.0 / rows.n_rows if counts else 1.0)
        whole_C = sign * zero_C
    else:
        gain_C = before.std_E
        origin_C = np.sum([slopes[name] * spread[name].mean_E for name in slopes], axis=0)
        bend = sum(protocol.components[name] * value for name, value in geometry.whole().items())
        whole_C = (sign * rows.n_rows if counts else sign) * before.mean_E - origin_C + bend
    return Level(
        effects=held,
        spread=before,
        shares={name: slope_C * before.inverse_E for name, slope_C in slopes.items()},
        means={name: kernels[name].rows.mean_E for name in slopes},
        gain_C=gain_C,
        offset_C=zero_C if counts else np.zeros_like(zero_C),
        whole_C=np.asarray(whole_C),
        base_C=np.full(len(zero_C), ANY_TEXT),
    )


def _of_tasks(level: Level, units: UnitSelection) -> F64:
    """Standard deviation of a task's mean effect over its units, for each of them, (E,): a task's effect in theirs."""
    blocks = (RowMoments.of(units.mean_per_task(block)) for _, block in level.effects.blocks())
    return np.repeat(functools.reduce(RowMoments.merge, blocks).spread.std_E, units.counts_T)
