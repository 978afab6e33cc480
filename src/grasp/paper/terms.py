"""The geometry terms of a prediction, and the calibration family whose moments standardize them.

A protocol with interactions predicts, with relevance A_m of kernel m and geometric components K_c such as `joint.pair`
(eq:component-predictor),

    V(S) = sum_m weight_m z(A_m(S)) + sum_c omega_c z(K_c(S)).

z subtracts the mean and divides by the standard deviation over the *calibration family* of the protocol: subsets drawn
at random, never the subsets that are evaluated. Deviation from the paper: several relevance kernels may be summed.

Start with `GeometryTerms.from_artifact`. Additive protocols do not use this module.
Shape letters: B subsets, C columns (targets or units), D sketch width.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self, cast

import numpy as np

from grasp.arrays import F64
from grasp.artifact.label_table import LabelColumn
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import label_column
from grasp.moments import MeanStd
from grasp.paper.protocol import CalibrationSettings, InteractionProtocol
from grasp.paper.sketches import SketchWithNorms
from grasp.paper.standardize import (
    PairSums,
    has_closed_form,
    pair_moments,
    relevance_moments,
    sampled_moments,
    self_moments,
)
from grasp.paper.subset_sums import (
    Geometry,
    Kind,
    SketchName,
    SketchSums,
    WeightSums,
    direct_sum,
    required_sketches,
    subset_relevance,
)
from grasp.predict.families import Family
from grasp.predict.predictor import KernelRelevance
from grasp.predict.weights import SubsetBlock, Weights


@dataclass(frozen=True, slots=True)
class CalibrationFamily:
    """The family of subsets that standardizes components; its random stream `calibration` differs from all others."""

    family: Family
    n_subsets: int
    seed: int
    labels: LabelColumn | None

    @classmethod
    def from_calibration(cls, calibration: CalibrationSettings, artifact: ArtifactReader) -> Self:
        """Create the family of a protocol, with the labels of the rows if it draws by a label."""
        family = calibration.parsed
        labels = None if family.label is None else label_column(artifact, family.label)
        return cls(family, calibration.n_subsets, calibration.seed, labels)

    def blocks(self, n_rows: int) -> Iterator[SubsetBlock]:
        """Draw the subsets of the family."""
        return self.family.draw(
            self.n_subsets, n_rows=n_rows, labels=self.labels, seed=self.seed, purpose="calibration"
        )

    def __str__(self) -> str:
        return f"{self.family}, {self.n_subsets} subsets, seed {self.seed}"


@dataclass(frozen=True, slots=True)
class GeometryTerms:
    """The geometry part of a prediction, sum_c omega_c z(K_c), for one artifact.

    Methods take the sums of B subsets: those of every required sketch, by name, and those of the weights.
    """

    protocol: InteractionProtocol
    n_rows: int
    sketches: Mapping[str, SketchWithNorms]
    mean_std: Mapping[str, MeanStd]  # by component: mean and standard deviation of K_c over the calibration family

    @classmethod
    def from_artifact(
        cls,
        artifact: ArtifactReader,
        protocol: InteractionProtocol,
        sketches: Mapping[str, SketchWithNorms],
        family: CalibrationFamily | None,
    ) -> Self:
        """Compute the mean and standard deviation of every component of the protocol.

        Args:
            artifact: artifact of the rows.
            protocol: protocol, resolved for the artifact.
            sketches: the sketches that the protocol requires, by name.
            family: calibration family; None if the protocol has no components.
        Raises:
            SubsetError: the family draws by a label that the artifact does not have.
        """
        mean_std = {} if family is None else family_moments(protocol, {}, sketches, family, artifact.n_rows)
        return cls(protocol, artifact.n_rows, sketches, mean_std)

    def z_scores(self, sketch_sums: Mapping[str, SketchSums], weight_sums: WeightSums) -> dict[str, F64]:
        """Return z(K_c), (B,), over the calibration family."""
        return {
            name: self.mean_std[name].z_scores(value_B)
            for name, value_B in _component_values(self.protocol, self.sketches, sketch_sums, weight_sums).items()
        }

    def contributions(self, sketch_sums: Mapping[str, SketchSums], weight_sums: WeightSums) -> dict[str, F64]:
        """Return the contribution of each component to a change, omega_c (K_c(S) - K_c(corpus)) / std, (B,)."""
        corpus_sums = {name: sketch.totals.as_subset() for name, sketch in self.sketches.items()}
        corpus_z = self.z_scores(corpus_sums, WeightSums.corpus(self.n_rows))
        return {
            name: self.protocol.components[name] * (z_B - corpus_z[name])
            for name, z_B in self.z_scores(sketch_sums, weight_sums).items()
        }

    @property
    def dropped(self) -> tuple[str, ...]:
        """Components without variance over the family, which contribute nothing."""
        return tuple(name for name, mean_std in self.mean_std.items() if not mean_std.inverse_std_C.any())


def family_moments(
    protocol: InteractionProtocol,
    kernels: Mapping[str, KernelRelevance],
    sketches: Mapping[str, SketchWithNorms],
    family: CalibrationFamily,
    n_rows: int,
) -> dict[str, MeanStd]:
    """Compute mean and standard deviation of A of each kernel and of each component over the calibration family.

    Uniform and Bernoulli families have closed forms; of other families, subsets are drawn.

    Args:
        protocol: components, side and weighting.
        kernels: relevance by kernel; may be empty.
        sketches: sketches of the components; may be empty.
        family: calibration family.
        n_rows: number of rows of the corpus.
    """
    side, weighting, drawn = protocol.side, protocol.weighting, family.family
    if has_closed_form(drawn):
        moments = {name: relevance_moments(kernel.rows, drawn, side, weighting) for name, kernel in kernels.items()}
        pair_sums_of: dict[str, PairSums] = {}  # by sketch name; one pass over each sketch
        for component, (sketch_name, kind) in _parsed_components(protocol).items():
            if kind == "self" and sketch_name in sketches:
                moments[component] = self_moments(sketches[sketch_name].norm2_moments, drawn, side, weighting)
            elif sketches:
                if sketch_name not in pair_sums_of:
                    stored = [sketches[name] for name in required_sketches([component])]
                    blocks_of = zip(*(sketch.blocks() for sketch in stored), strict=True)
                    concatenated = (np.concatenate([block for _, block in blocks], axis=1) for blocks in blocks_of)
                    mean_D = np.concatenate([sketch.totals.mean_D for sketch in stored])
                    pair_sums_of[sketch_name] = PairSums.of(concatenated, mean_D)
                moments[component] = pair_moments(pair_sums_of[sketch_name], kind, drawn, side, weighting)
        return moments

    def values_of_block(weights: Weights) -> dict[str, F64]:
        """Return A of each kernel and the components of a block of subsets."""
        weight_sums = WeightSums.from_weights(weights)
        relevance = {
            name: subset_relevance(
                kernel.relevance.sums(weights),
                kernel.rows.mean_C * kernel.rows.n_rows,
                weight_sums,
                side,
                weighting,
            )
            for name, kernel in kernels.items()
        }
        sketch_sums = {name: sketch.sketch_sums(weights) for name, sketch in sketches.items()}
        return relevance | _component_values(protocol, sketches, sketch_sums, weight_sums)

    return sampled_moments(values_of_block(block.weights) for block in family.blocks(n_rows))


def _component_values(
    protocol: InteractionProtocol,
    sketches: Mapping[str, SketchWithNorms],
    sketch_sums: Mapping[str, SketchSums],
    weight_sums: WeightSums,
) -> dict[str, F64]:
    """Return the components of B subsets, not standardized, as far as their sketches are available.

    Source: eq:ia-components.
    """
    geometry: dict[str, Geometry] = {
        name: sketch_sums[name].geometry(weight_sums, sketches[name].totals, protocol.side, protocol.weighting)
        for name in required_sketches(protocol.components)
        if name in sketches
    }
    if {"hidden", "residual"} <= geometry.keys():
        geometry["joint"] = direct_sum(geometry["hidden"], geometry["residual"])
    return {
        component: geometry[sketch_name][kind]
        for component, (sketch_name, kind) in _parsed_components(protocol).items()
        if sketch_name in geometry
    }


def _parsed_components(protocol: InteractionProtocol) -> dict[str, tuple[SketchName, Kind]]:
    """Split component names such as `joint.pair` into ("joint", "pair"); they were validated with the protocol."""
    return {name: cast("tuple[SketchName, Kind]", tuple(name.split("."))) for name in protocol.components}
