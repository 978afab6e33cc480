"""Weighted sums of rows, and the geometry of a subset that follows from them.

Everything a subset is scored by is a function of a few sums over its rows: of the weights, of the sketches, and of
their squared norms. They are taken once, for the retained rows with raw weights; the omitted side, the weighting and
the centring are arithmetic on them and on the totals of the corpus, so the complement of a subset is never made.

Shape letters: B subsets, N rows of the corpus, n rows of one block, D sketch width, C value columns.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from grasp.errors import ShapeError
from grasp.predict.accelerator import cuda_backend
from grasp.predict.blocks import Side
from grasp.predict.weights import (
    OmittedRows,
    PackedMasks,
    SliceShares,
    Weights,
    weight_sums,
)

F64 = NDArray[np.float64]
F = NDArray[np.floating[Any]]
Weighting = Literal["count", "mean"]
Half = Literal["hidden", "residual", "joint", "product"]
Kind = Literal["raw", "self", "pair", "cent"]
JOINT: tuple[Half, ...] = ("hidden", "residual")  # what `joint` is made of

# What a sum over weights costs in nanoseconds of one core: a column of a row that is gathered, by scipy; an entry that
# is set in a dense matrix; a cell of that matrix, and its product with a column.
GATHERED, SET, CELL, MULTIPLIED = 2.0, 40.0, 4.0, 0.2
# Rows of masks that are unpacked and multiplied at once.
MASK_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Geometry:
    """Quadratic components of B subsets, each (B,), in the squared unit of the sketch. Source: eq:ia-components."""

    raw_B: F64
    self_B: F64
    pair_B: F64
    cent_B: F64

    def __getitem__(self, kind: Kind) -> F64:
        values: F64 = getattr(self, f"{kind}_B")
        return values


@dataclass(frozen=True, slots=True)
class QuadraticWeights:
    """Weights of K_raw, K_self and K_cent of one sketch; K_pair = K_raw - K_self is folded into the first two."""

    raw: float = 0.0
    own: float = 0.0  # of K_self
    cent: float = 0.0

    @property
    def bend(self) -> float:
        """Weight of ||s||^2: K_raw and K_cent share it."""
        return self.raw + self.cent

    def plus(self, kind: str, weight: float) -> "QuadraticWeights":
        """With the weight of one more component."""
        raw, own, cent = {"raw": (1, 0, 0), "self": (0, 1, 0), "pair": (1, -1, 0), "cent": (0, 0, 1)}[kind]
        return QuadraticWeights(self.raw + raw * weight, self.own + own * weight, self.cent + cent * weight)


@dataclass(frozen=True, slots=True)
class SubsetMass:
    """Sums of weights of B subsets: what `mean` divides by, and what centring multiplies the mean sketch with."""

    retained_B: F64  # sum of w_i
    omitted_B: F64  # sum over the corpus of |1 - w_i|; the number of omitted rows where weights are 1
    n_rows: int

    @classmethod
    def of(cls, weights: Weights) -> Self:
        """Masses of a block of subsets."""
        return cls(*weight_sums(weights), weights.shape[1])

    @classmethod
    def whole(cls, n_rows: int) -> Self:
        """Of the corpus, as a block of one subset."""
        return cls(np.array([float(n_rows)]), np.zeros(1), n_rows)

    def factor(self, side: Side, weighting: Weighting) -> F64:
        """(B,) what raw weights are multiplied by: 1 for `count`, 1 / sum |w| for `mean`; 0 for an empty side."""
        mass_B = self.retained_B if side == "retained" else self.omitted_B
        if weighting == "count":
            return np.ones_like(mass_B)
        return np.divide(1.0, mass_B, out=np.zeros_like(mass_B), where=mass_B > 0)


@dataclass(frozen=True, slots=True)
class SketchSums:
    """Sums of one sketch over the retained rows of B subsets, raw weights, float64."""

    total_BD: F64  # sum of w_i phi_i
    norm_B: F64  # sum of w_i ||phi_i||^2
    square_norm_B: F64  # sum of w_i^2 ||phi_i||^2

    def geometry(self, mass: SubsetMass, corpus: "SketchTotals", side: Side, weighting: Weighting) -> Geometry:
        """Components of one sketch for a side and a weighting.

        The omitted side has weights 1 - w_i: for plain subsets the rows that were left out, for a row that is
        doubled (w = 2) a row taken out -1 times.
        Source: eq:ia-components. Deviation: `mean` divides the weights by their sum (design, weighting).
        """
        total_BD, square_B, weight_B = self.total_BD, self.square_norm_B, mass.retained_B
        if side == "omitted":
            total_BD = corpus.total_D - total_BD
            square_B = np.maximum(corpus.norm - 2.0 * self.norm_B + square_B, 0.0)
            weight_B = mass.n_rows - weight_B
        factor_B = mass.factor(side, weighting)
        total_BD = total_BD * factor_B[:, None]
        raw_B = np.einsum("bd,bd->b", total_BD, total_BD)
        self_B = square_B * factor_B**2
        shift_BD = total_BD - np.outer(weight_B * factor_B, corpus.mean_D)
        cent_B = np.einsum("bd,bd->b", shift_BD, shift_BD)
        return Geometry(raw_B=raw_B, self_B=self_B, pair_B=raw_B - self_B, cent_B=cent_B)


@dataclass(frozen=True, slots=True)
class SketchTotals:
    """Sums of one sketch over the whole corpus."""

    total_D: F64
    norm: float  # sum of ||phi_i||^2
    n_rows: int

    @property
    def mean_D(self) -> F64:  # noqa: N802 - a shape suffix
        """phi-bar of eq:ia-components."""
        return np.asarray(self.total_D / self.n_rows)

    def whole(self) -> SketchSums:
        """The corpus itself as a block of one subset."""
        norm_B = np.array([self.norm])
        return SketchSums(self.total_D[None], norm_B, norm_B)


def dense_pays(entries: int, cells: int, width: int, *, gathered: float = GATHERED) -> bool:
    """Whether a dense product with `width` columns beats gathering the rows of `entries` nonzero weights."""
    return entries * (gathered * width - SET) > cells * (CELL + MULTIPLIED * width)


def direct_sum(hidden: Geometry, residual: Geometry) -> Geometry:
    """Geometry of the concatenated sketch: every component adds. Source: eq:feature-sketch."""
    return Geometry(
        raw_B=hidden.raw_B + residual.raw_B,
        self_B=hidden.self_B + residual.self_B,
        pair_B=hidden.pair_B + residual.pair_B,
        cent_B=hidden.cent_B + residual.cent_B,
    )


def geometry(weights_BN: csr_array, sketch_ND: F, mean_D: F) -> Geometry:
    """Split ||sum_i w_i phi_i||^2 into self, pair and centred parts for sketches in memory, weights as they are.

    Source: eq:ia-components, eq:quadratic-expansion.
    """
    sketch_ND = np.asarray(sketch_ND, dtype=np.float64)  # pair = raw - self cancels badly in float32
    total_BD = weights_BN @ sketch_ND
    raw_B = np.einsum("bd,bd->b", total_BD, total_BD)
    self_B = weights_BN.power(2) @ np.einsum("nd,nd->n", sketch_ND, sketch_ND)
    shift_BD = total_BD - np.outer(_sum(weights_BN), mean_D)
    cent_B = np.einsum("bd,bd->b", shift_BD, shift_BD)
    return Geometry(raw_B=raw_B, self_B=self_B, pair_B=raw_B - self_B, cent_B=cent_B)


class BlockSums:
    """sum_i w_i x_i of B subsets over rows that arrive in blocks: (B, C) float64, the corpus is never in memory.

    What weights name is multiplied in the form that they have: masks as they are unpacked, omitted rows as what is
    taken off the sum of all rows, slices once for all subsets.
    """

    def __init__(self, weights: Weights, *, dense: bool | None = None) -> None:
        """Bind the weights.

        Args:
            dense: multiply sparse weights as dense ones, or not; None: where it pays.
        """
        self._weights, self._dense = weights, dense
        entries = weights.omitted_BN if isinstance(weights, OmittedRows) else weights
        self._by_row = entries.tocsc() if isinstance(entries, csr_array) else None
        self.shape = weights.shape

    def product(self, start: int, values_nC: F) -> F64:
        """The part that rows [start, start + n) add.

        Masks are multiplied in float32, large ones on a GPU where there is one, and added up in float64 every MASK_ROWS
        rows: within 2e-6 of sum_i |x_i|. All else is float64.
        """
        stop = start + len(values_nC)
        if stop > self.shape[1]:
            raise ShapeError(f"sums: rows {start} to {stop} were given for a corpus of {self.shape[1]} rows")
        weights = self._weights
        if isinstance(weights, PackedMasks):
            return _masked_sums(weights, start, values_nC)
        wide_nC: F64 = np.asarray(values_nC, dtype=np.float64)
        if isinstance(weights, SliceShares):
            return np.asarray(weights.share_BG @ _slice_sums(weights, start, wide_nC))
        part_BC = self._entries(start, wide_nC)
        return np.asarray(wide_nC.sum(axis=0) - part_BC) if isinstance(weights, OmittedRows) else part_BC

    def _entries(self, start: int, values_nC: F64) -> F64:
        assert self._by_row is not None
        part = self._by_row[:, start : start + len(values_nC)]
        dense = self._dense
        if dense is None:
            dense = dense_pays(part.nnz, self.shape[0] * len(values_nC), values_nC.shape[1])
        if dense:
            return np.asarray(part.toarray() @ values_nC)
        return np.asarray(part @ values_nC)


def _masked_sums(masks: PackedMasks, start: int, values_nC: F) -> F64:
    backend = cuda_backend(masks.shape[0] * values_nC.size)
    if backend is not None:
        on_gpu: F64 = backend.masked_sums(masks, start, values_nC, MASK_ROWS, "cuda")
        return on_gpu
    out_BC = np.zeros((masks.shape[0], values_nC.shape[1]))
    for first in range(0, len(values_nC), MASK_ROWS):
        values = np.asarray(values_nC[first : first + MASK_ROWS], dtype=np.float32)
        mask_Bn = masks.columns(start + first, start + first + len(values))
        out_BC += mask_Bn.astype(np.float32) @ values
    return out_BC


def _slice_sums(weights: SliceShares, start: int, values_nC: F64) -> F64:
    """(G, C) sums over the rows of each slice that are in the block."""
    codes_n = weights.codes_N[start : start + len(values_nC)]
    shape = (weights.share_BG.shape[1], len(values_nC))
    member = csr_array((np.ones(len(codes_n)), (codes_n, np.arange(len(codes_n)))), shape=shape)
    return np.asarray(member @ values_nC)


def subset_relevance(sum_BE: F64, total_E: F64, mass: SubsetMass, side: Side, weighting: Weighting) -> F64:
    """A_e of B subsets from sums over their retained rows, (B, E), in the unit of the relevance.

    Args:
        sum_BE: sum of w_i a_ie over retained rows, raw weights.
        total_E: sum of a_ie over the corpus.
    Source: eq:grasp-subset-relevance. Deviation: on the omitted side the sign is flipped, so that more is better on
        either side (design, side).
    """
    factor_B1 = mass.factor(side, weighting)[:, None]
    if side == "retained":
        return np.asarray(factor_B1 * sum_BE)
    return np.asarray(factor_B1 * (sum_BE - total_E))


def halves_needed(components: Mapping[str, float]) -> tuple[str, ...]:
    """Sketches that `half.kind` names rely on; `joint` needs hidden and residual."""
    halves = {name.split(".")[0] for name in components}
    if "joint" in halves:
        halves |= set(JOINT)
    return tuple(half for half in ("hidden", "residual", "product") if half in halves)


def _sum(weights_BN: csr_array) -> F64:
    return np.asarray(weights_BN.sum(axis=1), dtype=np.float64).ravel()
