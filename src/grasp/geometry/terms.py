"""Geometry terms of a protocol, and the calibration family that standardizes them.

Start with `GeometryTerms.from_artifact`.

    V(S) = sum_m weight_m z(A_m(S)) + sum_c omega_c z(K_c(S))

z uses the mean and standard deviation over the calibration family of the protocol, never over the evaluated subsets.
Additive protocols do not use this module.
Source: eq:component-predictor. Deviation: several relevance kernels may be summed as z-scores.
Shape letters: B subsets, C columns (targets or units), D sketch width.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, get_args

import numpy as np
from numpy.typing import NDArray

from grasp.arrays import F32, F64, Blocks
from grasp.artifact.label_table import LabelColumn
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import cached, label_column
from grasp.geometry.geometry_rule import CalibrationSettings, InteractionProtocol
from grasp.geometry.standardize import (
    PairSums,
    has_closed_form,
    pair_moments,
    relevance_moments,
    sampled_moments,
    self_moments,
)
from grasp.geometry.subset_sums import (
    JOINT,
    Geometry,
    Half,
    Kind,
    QuadraticWeights,
    SketchSums,
    SketchTotals,
    SubsetMass,
    direct_sum,
    halves_needed,
    subset_relevance,
)
from grasp.moments import ColumnSpread, StreamingMoments
from grasp.predict.families import Family
from grasp.predict.predictor import KernelRelevance
from grasp.predict.weights import RowSums, SubsetBlock, Weights, block_rows

BLOCK_ROWS = 8_192


class NormedSketch(RowSums):
    """One sketch of every row, with sums of the sketch and of its squared norms."""

    def __init__(self, artifact: ArtifactReader, half: str) -> None:
        self.artifact, self.name = artifact, f"{half}_sketch"  # name of the array
        width = next(artifact.array_blocks(self.name, block_rows=1))[1].shape[1]

        def with_norms() -> Blocks:
            """Yield the sketch with the squared norm of each row as a last column; the norm is summed in float64."""
            for start, block in artifact.array_blocks(self.name, block_rows=block_rows(width + 1)):
                wider = np.empty((len(block), width + 1), dtype=np.float32)
                wider[:, :-1], wider[:, -1] = block, np.einsum("nd,nd->n", block, block, dtype=np.float64)
                yield start, wider

        self.normed = RowSums(with_norms, artifact.n_rows, width + 1)  # ||phi||^2 is the last column
        array_NC = None if self.normed.array_NC is None else self.normed.array_NC[:, :-1]
        on_disk = functools.partial(artifact.array_blocks, self.name, block_rows=BLOCK_ROWS)
        super().__init__(on_disk, artifact.n_rows, width, array_NC=array_NC)
        self.totals, self.norms = cached(
            artifact, (self.name, "norms"), 8 * width, lambda: _totals(self.normed.blocks())
        )  # corpus sums, and moments of ||phi||^2

    def blocks(self) -> Blocks:
        """Yield the sketch in blocks of BLOCK_ROWS rows, from memory if it is loaded."""
        if self.array_NC is None:
            yield from self._blocks()
            return
        for start in range(0, len(self.array_NC), BLOCK_ROWS):
            yield start, self.array_NC[start : start + BLOCK_ROWS]

    def rows(self, row_index: NDArray[np.int64]) -> F32:
        """Return the sketches of the given rows, in this order."""
        return self.artifact.array_rows(self.name, row_index) if self.array_NC is None else self.array_NC[row_index]

    def dot(self, vector_D: F64) -> F64:
        """Return <phi_i, vector> of every row, (N,)."""
        return np.concatenate([np.einsum("nd,d->n", block, vector_D) for _, block in self.blocks()])

    def norms_of_rows(self) -> F64:
        """Return ||phi_i||^2 of every row, (N,)."""
        parts = [np.einsum("nd,nd->n", block, block, dtype=np.float64) for _, block in self.blocks()]
        return np.concatenate(parts)

    def sums(self, weights: Weights) -> F64:
        """Return sum_i w_i phi_i of every subset, (B, D)."""
        return self.normed.sums(weights)[:, :-1]

    def normed_sums(self, weights: Weights) -> SketchSums:
        """Return sums of the sketch, its squared norms, and squared norms times squared weights over B subsets."""
        sketch_and_norm_BC = self.normed.sums(weights)
        # w^2 = w for binary weights
        square_B = sketch_and_norm_BC[:, -1]
        if not weights.is_binary:
            square_B = self.normed.sums(weights.mapped(np.square))[:, -1]
        return SketchSums(sketch_and_norm_BC[:, :-1], sketch_and_norm_BC[:, -1], square_B)


def pair_sums(sketches: Sequence[NormedSketch]) -> PairSums:
    """Compute `PairSums` of one sketch, or of several concatenated, in one pass."""
    sums = PairSums.empty(np.concatenate([sketch.totals.mean_D for sketch in sketches]))
    for parts in zip(*(sketch.blocks() for sketch in sketches), strict=True):
        sums = sums.plus(np.concatenate([block for _, block in parts], axis=1))
    return sums


def _totals(blocks: Blocks) -> tuple[SketchTotals, StreamingMoments]:
    """Return sums over the corpus of a sketch and its squared norms, and the moments of the latter."""
    norms = StreamingMoments()
    totals: list[F64] = []
    for _, block in blocks:
        totals.append(block.sum(axis=0, dtype=np.float64))
        norms.add(block[:, -1:])
    total_C = np.sum(totals, axis=0)
    return SketchTotals(total_C[:-1], float(total_C[-1]), norms.n_rows), norms


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
    """The geometry part of a prediction, sum_c omega_c z(K_c), for one artifact."""

    protocol: InteractionProtocol
    n_rows: int
    sketches: Mapping[str, NormedSketch]
    moments: Mapping[str, ColumnSpread]  # moments of every K_c over the family

    @classmethod
    def from_artifact(
        cls,
        artifact: ArtifactReader,
        protocol: InteractionProtocol,
        sketches: Mapping[str, NormedSketch],
        family: CalibrationFamily | None,
    ) -> Self:
        """Compute the moments of every component of the protocol.

        Args:
            family: calibration family; None if the protocol has no components.
        Raises:
            SubsetError: the family draws by a label that the artifact does not have.
        """
        moments = {} if family is None else family_moments(protocol, {}, sketches, family, artifact.n_rows)
        return cls(protocol, artifact.n_rows, sketches, moments)

    def values(self, sums: Mapping[str, SketchSums], mass: SubsetMass) -> dict[str, F64]:
        """Return K_c in natural units, (B,), for the side and weighting of the protocol."""
        return _component_values(self.protocol, self.sketches, sums, mass)

    def z(self, sums: Mapping[str, SketchSums], mass: SubsetMass) -> dict[str, F64]:
        """Return z-scores of the components over the family, (B,)."""
        return {name: self.moments[name].z(value_B) for name, value_B in self.values(sums, mass).items()}

    def parts(self, sums: Mapping[str, SketchSums], mass: SubsetMass) -> dict[str, F64]:
        """Return the part of each component in a change, omega_c (K_c(S) - K_c(corpus)) / sd, (B,)."""
        corpus_z = self.corpus_z()
        return {
            name: self.protocol.components[name] * (z_B - corpus_z[name]) for name, z_B in self.z(sums, mass).items()
        }

    def corpus_z(self) -> dict[str, float]:
        """Return z(K_c) of the corpus."""
        sums = {half: sketch.totals.as_subset() for half, sketch in self.sketches.items()}
        return {name: float(z_1[0]) for name, z_1 in self.z(sums, SubsetMass.corpus(self.n_rows)).items()}

    @property
    def halves(self) -> dict[str, QuadraticWeights]:
        """Weights of K_raw, K_self and K_cent of every sketch in V; a `joint` component contributes to both halves."""
        halves: dict[str, QuadraticWeights] = {}
        for name, omega in self.protocol.components.items():
            slope = omega * float(self.moments[name].inverse_C[0])
            half, kind = name.split(".")
            for part in JOINT if half == "joint" else (half,):
                halves[part] = halves.get(part, QuadraticWeights()).plus(kind, slope)
        return {half: weights for half, weights in halves.items() if weights != QuadraticWeights()}

    @property
    def dropped(self) -> tuple[str, ...]:
        """Components without variance over the family, which contribute nothing."""
        return tuple(name for name, item in self.moments.items() if not item.inverse_C.any())


def family_moments(
    protocol: InteractionProtocol,
    kernels: Mapping[str, KernelRelevance],
    sketches: Mapping[str, NormedSketch],
    family: CalibrationFamily,
    n_rows: int,
) -> dict[str, ColumnSpread]:
    """Compute moments of A for each kernel and of the components; subsets are drawn only without a closed form.

    Args:
        protocol: components, side and weighting.
        kernels: relevance by kernel; may be empty.
        sketches: sketches of the components; may be empty.
        family: calibration family.
        n_rows: number of rows of the corpus.
    """
    exact = _closed_forms(protocol, kernels, sketches, family.family)
    required = {*kernels, *(name for name, (half, _) in _components(protocol).items() if sketches)}
    if exact.keys() >= required:
        return exact

    def components(weights: Weights) -> dict[str, F64]:
        """Return A of each kernel and the components of a block of subsets."""
        mass = SubsetMass.from_weights(weights)
        values = {
            name: subset_relevance(
                kernel.relevance.sums(weights),
                kernel.rows.mean_C * kernel.rows.n_rows,
                mass,
                protocol.side,
                protocol.weighting,
            )
            for name, kernel in kernels.items()
        }
        sums = {half: sketch.normed_sums(weights) for half, sketch in sketches.items()}
        return values | _component_values(protocol, sketches, sums, mass)

    return sampled_moments(components(block.weights) for block in family.blocks(n_rows)) | exact


def _component_values(
    protocol: InteractionProtocol,
    sketches: Mapping[str, NormedSketch],
    sums: Mapping[str, SketchSums],
    mass: SubsetMass,
) -> dict[str, F64]:
    """Return the components of B subsets in natural units. Source: eq:ia-components."""
    halves: dict[str, Geometry] = {
        half: sums[half].geometry(mass, sketches[half].totals, protocol.side, protocol.weighting)
        for half in halves_needed(protocol.components)
        if half in sketches
    }
    if {"hidden", "residual"} <= halves.keys():
        halves["joint"] = direct_sum(halves["hidden"], halves["residual"])
    return {name: halves[half][kind] for name, (half, kind) in _components(protocol).items() if half in halves}


def _closed_forms(
    protocol: InteractionProtocol,
    kernels: Mapping[str, KernelRelevance],
    sketches: Mapping[str, NormedSketch],
    family: Family,
) -> dict[str, ColumnSpread]:
    """Return the moments that have a closed form: all for a uniform or Bernoulli family, else none."""
    if not has_closed_form(family):
        return {}
    side, weighting = protocol.side, protocol.weighting
    exact = {name: relevance_moments(kernel.rows, family, side, weighting) for name, kernel in kernels.items()}
    pairs: dict[str, PairSums] = {}
    for name, (half, kind) in _components(protocol).items():
        if kind == "self" and half in sketches:
            exact[name] = self_moments(sketches[half].norms, family, side, weighting)
        elif sketches:
            if half not in pairs:
                pairs[half] = pair_sums([sketches[part] for part in halves_needed({name: 1.0})])
            exact[name] = pair_moments(pairs[half], kind, family, side, weighting)
    return exact


def _components(protocol: InteractionProtocol) -> dict[str, tuple[Half, Kind]]:
    """Split component names such as `joint.pair` into ("joint", "pair"); they were validated with the protocol."""
    halves: dict[str, Half] = {str(half): half for half in get_args(Half)}
    kinds: dict[str, Kind] = {str(kind): kind for kind in get_args(Kind)}
    parts = ((name, name.split(".")) for name in protocol.components)
    return {name: (halves[half], kinds[kind]) for name, (half, kind) in parts}
