"""The predictor for scoring protocols that are more than the mean effect of the retained rows.

Such a protocol (`protocol.InteractionProtocol`) differs in at least one of these settings:

    components   weights omega_c of geometric quantities K_c of a subset, such as ``joint.pair``: the *geometry*; they
                 make the value of a row depend on the other rows of the subset (module `subset_sums`)
    weighting    `count` adds up the relevance of rows, `mean` (default) averages it
    side         `omitted` scores the rows that are left out, `retained` (default) those that are trained on

The predicted change of utility relative to the whole corpus is

    change(S) = gain (A(S) - A(corpus)) + sum_c omega_c (z(K_c(S)) - z(K_c(corpus)))

A is the relevance of a subset for side and weighting, computed from *effects* of rows: relevance standardized over the
rows. z standardizes over the calibration family, a set of random subsets (module `terms`).

*gain* keeps the unit of an effect. Without geometry it is 1, or 1 / N for the weighting `count`. With geometry both
parts are in standard deviations over the calibration family, so the gain is the standard deviation of relevance over
the rows, which undoes the standardization of effects. An *offset* is added to the effect of every row: 0 for the
weighting `mean`; for `count` the mean that standardization removed, since a sum depends on the zero of relevance.

Rows keep the weights of the subset. Of a law of diminishing returns only its factor for repeated epochs is applied, to
the whole change.

Start with `bind`, which creates the predictor of a protocol.
Source: eq:component-predictor, eq:grasp-subset-relevance (labels of the paper; see docs/paper_map.md).
Shape letters: B subsets, N rows, E units, T targets, C columns (targets or units), D sketch width.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.moments import MeanStd
from grasp.paper.protocol import InteractionProtocol
from grasp.paper.sketches import SketchWithNorms
from grasp.paper.subset_sums import SketchSums, WeightSums, required_sketches, subset_relevance
from grasp.paper.terms import CalibrationFamily, GeometryTerms, family_moments
from grasp.predict.predictor import (
    KernelRelevance,
    Predictor,
    RowEffects,
    SubsetSums,
    UnitSelection,
    combine_kernels,
    load_sketch,
    task_kernels,
    unit_effects,
    unit_kernels,
)
from grasp.predict.scoring_rule import kernel_weights
from grasp.predict.weights import Weights


@dataclass(frozen=True, slots=True)
class InteractionSums(SubsetSums):
    """The sums that a prediction with interactions depends on."""

    omitted_B: F64  # sum of |1 - w_i| over the corpus
    sketch_sums: Mapping[str, SketchSums]  # by sketch name; with squared norms, unlike `sketch`

    @property
    def weight_sums(self) -> WeightSums:
        """Sums of weights, which weighting `mean` divides by."""
        return WeightSums(self.effective_B, self.omitted_B, self.n_rows)


@dataclass(frozen=True, slots=True)
class InteractionEffects(RowEffects):
    """Effects of rows, with gain and offset; see the table in the module docstring."""

    gain_C: F64
    offset_C: F64


@dataclass(frozen=True, slots=True)
class InteractionPredictor(Predictor):
    """An `InteractionProtocol` bound to an artifact."""

    protocol: InteractionProtocol
    task: InteractionEffects
    unit_level: InteractionEffects | None
    sketches: Mapping[str, SketchWithNorms]
    terms: GeometryTerms

    def effective_weights(self, weights: Weights) -> Weights:
        """Return the weights unchanged; see the module docstring."""
        return weights

    def sums(self, weights: Weights, sketch_names: Collection[str] | None = None) -> InteractionSums:
        """Compute the sums of one block of subsets."""
        required = self.sketches if sketch_names is None else sketch_names
        weight_sums = WeightSums.from_weights(weights)
        sketch_sums = {name: sketch.sketch_sums(weights) for name, sketch in self.sketches.items() if name in required}
        return InteractionSums(
            n_rows=self.n_rows,
            weight_B=weight_sums.retained_B,
            n_retained_B=weights.sizes.astype(np.float64),
            effective_B=weight_sums.retained_B,
            effect_BT=self.task.effects.sums(weights),
            sketch={name: sums.total_BD for name, sums in sketch_sums.items()},
            omitted_B=weight_sums.omitted_B,
            sketch_sums=sketch_sums,
        )

    def reweighted(self, sums: SubsetSums, weight: float) -> InteractionSums:
        """Return the sums of the corpus in which the rows of each subset have another weight.

        The weight of all other rows is 1. Compared with the corpus, sums of w change by ``weight - 1`` times the sum
        over the rows of the subset, and sums of w^2 by ``weight^2 - 1`` times it.

        Args:
            sums: sums of subsets whose rows have weight 1, so that their size is the sum of their weights.
            weight: 0 drops the rows, 2 doubles them.
        """
        assert isinstance(sums, InteractionSums)
        size_B, n_rows, step, square_step = sums.effective_B, self.n_rows, weight - 1.0, weight**2 - 1.0
        corpus = {name: sketch.totals for name, sketch in self.sketches.items()}
        sketch_sums = {
            name: SketchSums(
                corpus[name].total_D + step * subset.total_BD,
                corpus[name].sum_norm2 + step * subset.sum_w_norm2_B,
                corpus[name].sum_norm2 + square_step * subset.sum_w_norm2_B,
            )
            for name, subset in sums.sketch_sums.items()
        }
        return InteractionSums(
            n_rows=n_rows,
            weight_B=n_rows + step * size_B,
            n_retained_B=n_rows - size_B if weight == 0.0 else np.full_like(size_B, n_rows),
            effective_B=n_rows + step * size_B,
            effect_BT=step * sums.effect_BT,  # effects add up to 0 over the corpus
            sketch={name: each.total_BD for name, each in sketch_sums.items()},
            omitted_B=np.abs(step) * size_B,
            sketch_sums=sketch_sums,
        )

    def change_of(self, sums: SubsetSums) -> F64:
        """Predict the change of utility relative to the whole corpus, (B, T); positive is better."""
        change_BT = self._relevance_change(sums.effect_BT, self.task.offset_C, sums) * self.task.gain_C
        change_BT = change_BT + self.geometry_change(sums)[:, None]
        if self.repetition_law.epochs is None:
            return change_BT
        return change_BT * sums.repetition_factor(self.repetition_law)[:, None]  # repetition reduces every change

    def change(self, weights: Weights) -> F64:
        """Predict the change of utility of subsets given by their weights, (B, T)."""
        return self.change_of(self.sums(weights, required_sketches(self.protocol.components)))

    def unit_change(self, weights: Weights, sums: SubsetSums) -> F64:
        """Predict the change of every unit from its own relevance, standardized for the unit, (B, E)."""
        level = self.unit_level
        assert level is not None
        additive_BE = level.gain_C * self._relevance_change(level.effects.sums(weights), level.offset_C, sums)
        return additive_BE + self.geometry_change(sums)[:, None]

    def change_by_units(self, sum_BE: F64, mean_E: F64, sums: SubsetSums) -> F64:
        """Decompose the change of each task into contributions of its units, (B, E); their mean is the change.

        Unlike in `unit_change`, relevance is standardized for the task.
        """
        offset_E = mean_E if self.protocol.weighting == "count" else np.zeros_like(mean_E)
        gain_E = np.repeat(self.task.gain_C, self.units.counts_T)
        return gain_E * self._relevance_change(sum_BE, offset_E, sums) + self.geometry_change(sums)[:, None]

    def geometry_change(self, sums: SubsetSums) -> F64:
        """Return the geometry part of a change, (B,); it is the same for every target."""
        assert isinstance(sums, InteractionSums)
        zero_B = np.zeros(len(sums.effective_B))
        return np.asarray(sum(self.terms.contributions(sums.sketch_sums, sums.weight_sums).values(), zero_B))

    def _relevance_change(self, sum_BC: F64, offset_C: F64, sums: SubsetSums) -> F64:
        """Return A of subsets minus A of the corpus, (B, C), for the side and weighting of the protocol.

        `sum_BC` is of row values that add up to 0 over the corpus; `offset_C` is added to the value of every row.
        """
        assert isinstance(sums, InteractionSums)
        side, weighting, total_C = self.protocol.side, self.protocol.weighting, self.n_rows * offset_C
        sum_BC = sum_BC + np.outer(sums.effective_B, offset_C)
        corpus_1C = subset_relevance(total_C[None], total_C, WeightSums.corpus(self.n_rows), side, weighting)
        return subset_relevance(sum_BC, total_C, sums.weight_sums, side, weighting) - corpus_1C


def bind(
    artifact: ArtifactReader,
    protocol: InteractionProtocol,
    units: UnitSelection,
    *,
    sketches: Sequence[str],
    per_unit: bool,
) -> Predictor:
    """Create the predictor of a resolved protocol; see `Predictor.from_artifact` for the arguments."""
    family = CalibrationFamily.from_calibration(protocol.calibration, artifact) if protocol.components else None
    sketch_names = sorted({*required_sketches(protocol.components), *sketches})
    additive = _assemble(artifact, protocol, units, family, per_unit=per_unit)
    if protocol.is_additive:  # only the order of averaging and standardization differs from a plain protocol
        return replace(additive, sketches={name: load_sketch(artifact, name) for name in sketch_names})
    with_norms = {name: SketchWithNorms(artifact, name) for name in sketch_names}
    terms = GeometryTerms.from_artifact(artifact, protocol, with_norms, family)
    overrides = {
        "task": _interaction_effects(additive.task, terms),
        "unit_level": None if additive.unit_level is None else _interaction_effects(additive.unit_level, terms),
        "sketches": with_norms,
        "dropped": (*additive.dropped, *terms.dropped),
        "unit": additive.unit if family is None else f"standard deviations over {family}",
    }
    shared = {field.name: getattr(additive, field.name) for field in fields(Predictor)}
    return InteractionPredictor(**shared | overrides, terms=terms)


def _assemble(
    artifact: ArtifactReader,
    protocol: InteractionProtocol,
    units: UnitSelection,
    family: CalibrationFamily | None,
    *,
    per_unit: bool,
) -> Predictor:
    """Combine the kernels as `assemble_predictor` does; with geometry, each is divided by its spread over the family.

    With `standardize.task: mean_of_standardised`, every unit is divided by its own spread before units are averaged.
    Reliability is not measured, since leaving out questions presumes additive effects.
    """

    def scales_of(kernels: Mapping[str, KernelRelevance]) -> Mapping[str, MeanStd]:
        """Return mean and standard deviation of each kernel over the rows, or of A over the calibration family."""
        if family is None:
            return {name: kernel.rows.mean_std for name, kernel in kernels.items()}
        return family_moments(protocol, kernels, sketches={}, family=family, n_rows=artifact.n_rows)

    units_first = protocol.standardize.task == "mean_of_standardised"
    of_units: dict[str, KernelRelevance] = {}
    if per_unit or units_first:
        of_units = unit_kernels(artifact, protocol if units_first else protocol.for_units, units)
    unit_scales = scales_of(of_units)
    unit_factors = {
        name: units.weight_E * (unit_scales[name].inverse_std_C if units_first else 1.0)
        for name in kernel_weights(protocol)
    }
    kernels = task_kernels(artifact, protocol, units, unit_factors)
    predictor = combine_kernels(artifact, protocol, units, kernels, scales_of(kernels), unit_factors)
    if not per_unit:
        return predictor
    return replace(predictor, unit_level=unit_effects(protocol, units, of_units, unit_scales))


def _interaction_effects(rows: RowEffects, terms: GeometryTerms) -> InteractionEffects:
    """Return effects of rows with gain and offset."""
    sums_rows = terms.protocol.weighting == "count"
    mean_C = rows.raw_mean_std.mean_C * rows.raw_mean_std.inverse_std_C  # mean relevance of the rows, in effects
    gain_C = np.full(len(mean_C), 1.0 / terms.n_rows if sums_rows else 1.0)
    if terms.protocol.components:
        gain_C = rows.raw_mean_std.std_C
    shared = {field.name: getattr(rows, field.name) for field in fields(RowEffects)}
    return InteractionEffects(**shared, gain_C=gain_C, offset_C=mean_C if sums_rows else np.zeros_like(mean_C))
