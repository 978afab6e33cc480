"""sum_i w_i x_i over rows, for a block of subsets: W @ X.

There is one loop over blocks of rows, `sums_over`, whether values are in memory or arrive. Where a block of subsets
names few of the rows that are in memory, or so many that torch repays being loaded, these are gathered instead.
Shape letters: B subsets, N rows of the corpus, n rows of one block, C value columns.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csc_array, csr_array

from grasp.arrays import F32, F64
from grasp.errors import ShapeError
from grasp.predict.row_arrays import Blocks
from grasp.predict.weights import PackedMasks, Weights

# Arrays up to this size are held in memory over all blocks of subsets; larger ones are read again for each.
HELD_BYTES = 256 << 20
# Numbers that are worked on at once: what is made of them fits the cache, and memory that is used again and again.
BLOCK_NUMBERS = 1 << 16
# Multiply-adds of one block of subsets from which torch is the faster way.
LARGE = 50_000_000
# Multiply-adds of all blocks from which loading torch, some seconds, is repaid as well.
REPAID = 3_000_000_000
# Rows of masks that are unpacked and multiplied at once.
MASK_ROWS = 4096


class RowSums:
    """Rows that are summed over subsets.

    Results are float64; where rows are added up in float32 (by torch, and masks) it is a few thousand of them at most:
    within 2e-6 of sum_i |w_i x_i| by torch, 3e-5 of masks, whether the values are held or not.
    """

    def __init__(self, blocks: Callable[[], Blocks], n_rows: int, width: int, *, held_NC: F32 | None = None) -> None:
        self._blocks, self._shape = blocks, (n_rows, width)
        if held_NC is None and n_rows * width * 4 <= HELD_BYTES:
            held_NC = np.empty(self._shape, dtype=np.float32)
            for start, block in blocks():
                held_NC[start : start + len(block)] = block
        self.held_NC = held_NC  # the values themselves, where they are in memory
        self._gathered = 0  # multiply-adds of entries so far
        self._total_C: F64 | None = None
        self._slices: csr_array | csc_array | PackedMasks | None = None  # whose sums are at hand
        self._sums_GC: F64 = np.empty((0, 0))

    @classmethod
    def over(cls, values_NC: F32) -> "RowSums":
        """Sums over values that are in memory already."""
        return cls(lambda: iter([(0, values_NC)]), *values_NC.shape, held_NC=values_NC)

    @property
    def width(self) -> int:
        """Columns of the values."""
        return self._shape[1]

    def blocks(self) -> Blocks:
        """The values that are summed, by blocks of rows from first to last."""
        if self.held_NC is None:
            yield from self._blocks()
            return
        rows = block_rows(self.width)
        for start in range(0, len(self.held_NC), rows):
            yield start, self.held_NC[start : start + rows]

    def dot(self, vector_C: F64) -> F64:
        """<x_i, vector> of every row, (N,); a block at a time, so that nothing as large as the values is made."""
        return np.concatenate([np.asarray(block @ vector_C, dtype=np.float64) for _, block in self.blocks()])

    def sums(self, weights: Weights) -> F64:
        """(B, C) for one block of subsets."""
        if weights.shape[1] != self._shape[0]:
            raise ShapeError(f"sums: weights of shape {weights.shape} for values of {self._shape[0]} rows")
        if weights.mix is not None:  # sums of slices are kept for the next block: a union of them costs O(G), not O(N)
            if self._slices is not weights.rows:
                (self._sums_GC,) = sums_over(self.blocks(), [Weights(weights.rows)], self.width)
                self._slices = weights.rows
            return np.asarray(weights.mix @ self._sums_GC)
        gathered_BC = None if self.held_NC is None else self._gather(weights.rows, self.held_NC)
        if gathered_BC is None:
            return sums_over(self.blocks(), [weights], self.width)[0]
        if not weights.base:
            return gathered_BC
        if self._total_C is None:
            assert self.held_NC is not None
            self._total_C = self.held_NC.sum(axis=0, dtype=np.float64)
        return weights.base * self._total_C + gathered_BC

    def _gather(self, rows_BN: csr_array | csc_array | PackedMasks, values_NC: F32) -> F64 | None:
        """The same out of the rows that are named alone, without `base`; None where it does not pay."""
        if not isinstance(rows_BN, csr_array):
            return None
        work = rows_BN.nnz * self.width
        self._gathered += work
        repaid = "torch" in sys.modules or (self._gathered >= REPAID and importlib.util.find_spec("torch") is not None)
        if work >= LARGE and repaid:
            from grasp.predict import sweep_torch  # noqa: PLC0415 - torch is loaded for large jobs only

            return sweep_torch.sums(values_NC, rows_BN)
        if rows_BN.nnz >= rows_BN.shape[1]:
            return None
        used_n, column = np.unique(rows_BN.indices, return_inverse=True)
        named_Bn = csr_array((rows_BN.data, column, rows_BN.indptr), shape=(rows_BN.shape[0], len(used_n)))
        return np.asarray(named_Bn @ values_NC[used_n], dtype=np.float64)


def sums_over(blocks: Iterable[tuple[int, NDArray[Any]]], subsets: Sequence[Weights], width: int) -> list[F64]:
    """W @ X for several blocks of subsets in one pass over values that arrive in blocks of rows; (B, C) float64 each.

    Masks are multiplied in float32, MASK_ROWS rows at most, and added up in float64: within 3e-5 of sum_i |x_i|. All
    else is float64.
    """
    by_row = [one.rows if isinstance(one.rows, PackedMasks) else one.rows.tocsc() for one in subsets]
    sums = [np.zeros((rows_GN.shape[0], width)) for rows_GN in by_row]
    for start, values_nC in blocks:
        stop = start + len(values_nC)
        if any(stop > rows_GN.shape[1] for rows_GN in by_row):
            n_rows = by_row[0].shape[1]
            raise ShapeError(f"sums: rows {start} to {stop} were given for a corpus of {n_rows} rows")
        wide_nC: F64 = np.asarray(values_nC, dtype=np.float64)
        for k, (rows_GN, one) in enumerate(zip(by_row, subsets, strict=True)):
            if isinstance(rows_GN, PackedMasks):
                for first in range(0, len(values_nC), MASK_ROWS):
                    values = np.asarray(values_nC[first : first + MASK_ROWS], dtype=np.float32)
                    part = rows_GN[:, start + first : start + first + len(values)]
                    sums[k] += part.astype(np.float32) @ values
            else:
                sums[k] += rows_GN[:, start:stop] @ wide_nC
            if one.base:
                sums[k] += one.base * wide_nC.sum(axis=0)
    return [sum_GC if one.mix is None else one.mix @ sum_GC for one, sum_GC in zip(subsets, sums, strict=True)]


def block_rows(width: int) -> int:
    """Rows that are worked on at once."""
    return max(1, BLOCK_NUMBERS // max(1, width))
