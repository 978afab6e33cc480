"""The predictor for protocols with interactions between rows, that sum rows, or that score the omitted rows.

Start with `bind`. With s(S) = A of eq:grasp-subset-relevance for the side and weighting of the protocol, the relevance
of rows contributes gain (s(S) - s(corpus)) to a change. Weighting `count` sums rows instead of averaging them, so
relevance is measured from its own zero (`offset`), and the sum is divided by the number of rows of the corpus to keep
the unit. Geometry adds its terms, in standard deviations over the calibration family (`terms`). Weights are used as
they are, without a repetition law.
Source: eq:component-predictor, eq:grasp-subset-relevance.
Shape letters: B subsets, N rows, E units, T targets, C columns (targets or units).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.geometry.geometry_rule import InteractionProtocol
from grasp.geometry.subset_sums import SketchSums, SubsetMass, halves_needed, subset_relevance
from grasp.geometry.terms import CalibrationFamily, GeometryTerms, NormedSketch, family_moments
from grasp.moments import ColumnSpread
from grasp.predict.predictor import (
    KernelRelevance,
    Predictor,
    RowEffects,
    SubsetSums,
    UnitSelection,
    assemble_predictor,
    load_sketch,
)
from grasp.predict.scoring_rule import Interaction, ScoringProtocol, kernel_weights
from grasp.predict.weights import Weights


@dataclass(frozen=True, slots=True)
class InteractionSums(SubsetSums):
    """The sums that a prediction depends on; in addition the omitted weight, and squared norms of sketches."""

    omitted_B: F64
    normed: Mapping[str, SketchSums]

    @property
    def mass(self) -> SubsetMass:
        """Sums of weights, which weighting `mean` divides by."""
        return SubsetMass(self.effective_B, self.omitted_B, self.n_rows)

    def cumulative(self) -> "InteractionSums":
        """Return sums over the first subset, the first two together, and so on; disjoint subsets with weights 1."""
        size_B = np.cumsum(self.effective_B)
        normed = {
            half: SketchSums(np.cumsum(part.total_BD, axis=0), np.cumsum(part.norm_B), np.cumsum(part.square_norm_B))
            for half, part in self.normed.items()
        }
        return _sums(self.n_rows, size_B, size_B, self.n_rows - size_B, np.cumsum(self.effect_BT, axis=0), normed)


def _sums(
    n_rows: int, weight_B: F64, n_retained_B: F64, omitted_B: F64, effect_BT: F64, normed: Mapping[str, SketchSums]
) -> InteractionSums:
    totals = {half: part.total_BD for half, part in normed.items()}
    return InteractionSums(n_rows, weight_B, n_retained_B, weight_B, effect_BT, totals, omitted_B, normed)


@dataclass(frozen=True, slots=True)
class InteractionLevel(RowEffects):
    """Effects of rows, and the factors that convert a difference of A into a change."""

    gain_C: F64  # factor from a difference of A, in effects, to a change
    offset_C: F64  # added to every effect before summing; with `count`, effects are relative to zero relevance


@dataclass(frozen=True, slots=True)
class InteractionPredictor(Predictor):
    """An `InteractionProtocol` bound to an artifact."""

    protocol: InteractionProtocol
    task: InteractionLevel
    unit_level: InteractionLevel | None
    sketches: Mapping[str, NormedSketch]
    terms: GeometryTerms

    def effective_weights(self, weights: Weights) -> Weights:
        """Return the weights unchanged: there is no repetition law."""
        return weights

    def sums(self, weights: Weights, sketches: Collection[str] | None = None) -> InteractionSums:
        """Compute the sums of one block of subsets."""
        selected = self.sketches if sketches is None else sketches
        mass = SubsetMass.from_weights(weights)
        effect_BT = self.task.effects.sums(weights)
        normed = {name: sketch.normed_sums(weights) for name, sketch in self.sketches.items() if name in selected}
        return _sums(self.n_rows, mass.retained_B, weights.sizes.astype(np.float64), mass.omitted_B, effect_BT, normed)

    def reweighted(self, sums: SubsetSums, weight: float) -> InteractionSums:
        """Return the sums of the corpus in which the rows of each subset have another weight.

        The weight is 1 + step for these rows, so sums of squared norms change by (1 + step)^2 - 1 = weight^2 - 1.
        """
        assert isinstance(sums, InteractionSums)
        size_B, n_rows, step, square = sums.effective_B, self.n_rows, weight - 1.0, weight**2 - 1.0
        totals = {half: sketch.totals for half, sketch in self.sketches.items()}
        normed = {
            half: SketchSums(
                totals[half].total_D + step * part.total_BD,
                totals[half].norm + step * part.norm_B,
                totals[half].norm + square * part.norm_B,
            )
            for half, part in sums.normed.items()
        }
        n_retained_B = n_rows - (weight == 0.0) * size_B
        return _sums(n_rows, n_rows + step * size_B, n_retained_B, np.abs(step) * size_B, step * sums.effect_BT, normed)

    def change_of(self, sums: SubsetSums) -> F64:
        """Predict the change of utility relative to the whole corpus, (B, T); positive is better."""
        change_BT = self._relative(sums.effect_BT, self.task.offset_C, sums) * self.task.gain_C
        change_BT = change_BT + self.geometry_change(sums)[:, None]
        if self.repetition_law.epochs is None:
            return change_BT
        return change_BT * sums.repetition_factor(self.repetition_law)[:, None]  # repetition reduces every change

    def change(self, weights: Weights) -> F64:
        """Predict the change of utility of subsets given by their weights, (B, T)."""
        return self.change_of(self.sums(weights, halves_needed(self.protocol.components)))

    def unit_change(self, weights: Weights, sums: SubsetSums) -> F64:
        """Predict the change of every unit from its own relevance, (B, E)."""
        level = self.unit_level
        assert level is not None
        additive_BE = level.gain_C * self._relative(level.effects.sums(weights), level.offset_C, sums)
        return additive_BE + self.geometry_change(sums)[:, None]

    def change_by_units(self, sum_BE: F64, mean_E: F64, sums: SubsetSums) -> F64:
        """Decompose the change of each task into contributions of its units, (B, E); their mean is the change."""
        offset_E = mean_E if self.protocol.weighting == "count" else np.zeros_like(mean_E)
        gain_E = np.repeat(self.task.gain_C, self.units.counts_T)
        return gain_E * self._relative(sum_BE, offset_E, sums) + self.geometry_change(sums)[:, None]

    def parts(self, weights: Weights, sums: SubsetSums) -> dict[str, F64]:
        """Return the part of each kernel (B, T) and component (B,) in a change, and components in natural units."""
        assert isinstance(sums, InteractionSums)
        parts, counts = dict[str, F64](), self.protocol.weighting == "count"
        for name, kernel in self.task_kernels.items():
            factor_T, mean_T = self.task.relevance_to_effect[name], kernel.rows.mean_C
            sum_BT = factor_T * (kernel.relevance.sums(weights) - np.outer(sums.effective_B, mean_T))
            offset_T = factor_T * mean_T if counts else np.zeros_like(factor_T)
            parts[f"part_{name}"] = self.task.gain_C * self._relative(sum_BT, offset_T, sums)
        parts |= {f"part_{name}": part_B for name, part_B in self.terms.parts(sums.normed, sums.mass).items()}
        return parts | {f"value_{name}": value_B for name, value_B in self.terms.values(sums.normed, sums.mass).items()}

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of the columns that `parts` returns."""
        names = tuple(self.protocol.components)
        parts = tuple(f"part_{name}" for name in (*self.task_kernels, *names))
        return (*parts, *(f"value_{name}" for name in names))

    def ranking_effects(self, effect_N: F64, weights_T: F64, tokens_N: NDArray[np.int64]) -> F64:
        """Return the values by which rows are ranked under a token budget; per token if rows are summed."""
        if self.protocol.weighting == "mean":
            return effect_N
        return (effect_N + float(self.task.offset_C @ weights_T)) / tokens_N

    def geometry_change(self, sums: SubsetSums) -> F64:
        """Return the geometry part of a change, (B,); it is the same for every target."""
        assert isinstance(sums, InteractionSums)
        nothing_B = np.zeros(len(sums.effective_B))
        return np.asarray(sum(self.terms.parts(sums.normed, sums.mass).values(), nothing_B))

    def _relative(self, sum_BC: F64, offset_C: F64, sums: SubsetSums) -> F64:
        """Return A of subsets minus A of the corpus, (B, C), for the side and weighting of the protocol.

        Args:
            sum_BC: sums of values that add up to 0 over the corpus.
            offset_C: constant that is added to each of these values.
        """
        assert isinstance(sums, InteractionSums)
        side, weighting, total_C = self.protocol.side, self.protocol.weighting, self.n_rows * offset_C
        sum_BC = sum_BC + np.outer(sums.effective_B, offset_C)
        whole_1C = subset_relevance(total_C[None], total_C, SubsetMass.corpus(self.n_rows), side, weighting)
        return subset_relevance(sum_BC, total_C, sums.mass, side, weighting) - whole_1C


def bind(
    artifact: ArtifactReader,
    protocol: ScoringProtocol,
    units: UnitSelection,
    *,
    sketches: Sequence[str],
    per_unit: bool,
    components: bool,
) -> Predictor:
    """Create the predictor of a fitted protocol; see `Predictor.from_artifact` for the arguments."""
    assert isinstance(protocol, InteractionProtocol)
    family = CalibrationFamily.from_calibration(protocol.calibration, artifact) if protocol.components else None
    wanted = sorted({*halves_needed(protocol.components), *sketches})

    def over_family(kernels: Mapping[str, KernelRelevance]) -> Mapping[str, ColumnSpread]:
        """Return the spread of A over the calibration family, the scale of kernels if there is geometry."""
        assert family is not None
        return family_moments(protocol, kernels, {}, family, artifact.n_rows)

    plain = assemble_predictor(
        artifact,
        protocol,
        units,
        per_unit=per_unit,
        components=components,
        family_scales=None if family is None else over_family,
        units_first=protocol.standardize.task == "mean_of_standardised",
    )
    if protocol.interaction is Interaction.NONE:
        return replace(plain, sketches={half: load_sketch(artifact, half) for half in wanted})
    held = {half: NormedSketch(artifact, half) for half in wanted}
    terms = GeometryTerms.from_artifact(artifact, protocol, held, family)
    overrides = {
        "task": _level(plain.task, terms),
        "unit_level": None if plain.unit_level is None else _level(plain.unit_level, terms),
        "sketches": held,
        "dropped": (*plain.dropped, *terms.dropped),
        "measure_reliability": None,  # holding out questions presumes additive effects
        "unit": plain.unit if family is None else f"standard deviations over {family}",
    }
    shared = {item.name: getattr(plain, item.name) for item in fields(Predictor)}
    return InteractionPredictor(**shared | overrides, terms=terms)


def _level(level: RowEffects, terms: GeometryTerms) -> InteractionLevel:
    protocol, n_rows, before = terms.protocol, terms.n_rows, level.spread
    counts, zero_C = protocol.weighting == "count", level.corpus_C
    # A of the corpus is the value of its mean row, times N for `count`. The mean over zero omitted rows is undefined;
    # it is set to that of a random subset of rows, whose expected change is 0.
    sign = 1.0 if protocol.side == "retained" else 0.0 if counts else -1.0
    gain_C, corpus_C = np.full(len(zero_C), 1.0 / n_rows if counts else 1.0), sign * zero_C
    if protocol.components:
        gain_C = before.std_C
        slopes = {
            name: weight * level.scales[name].inverse_C
            for name, weight in kernel_weights(protocol).items()
            if name in level.relevance_to_effect
        }
        origin_C = np.sum([slope_C * level.scales[name].mean_C for name, slope_C in slopes.items()], axis=0)
        bend = sum(protocol.components[name] * value for name, value in terms.corpus_z().items())
        corpus_C = (sign * n_rows if counts else sign) * before.mean_C - origin_C + bend
    shared = {item.name: getattr(level, item.name) for item in fields(RowEffects)}
    overrides = {"corpus_C": corpus_C, "gain_C": gain_C, "offset_C": zero_C if counts else 0.0 * zero_C}
    return InteractionLevel(**shared | overrides)
