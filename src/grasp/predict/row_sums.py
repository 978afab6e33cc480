"""sum_i w_i x_i over rows, for block after block of subsets, by whichever way the shape favours.

`RowSums` holds the values in memory where they fit and reads them again where they do not; `BlockSums` takes rows that
arrive in blocks. Few rows of each subset are gathered: by scipy's sparse product (small jobs; float64) or by
`sweep_torch` (large jobs, where torch is installed; on a GPU if it sees one). Many rows are a dense product, of bits
where weights come packed, on the GPU too. Of nearly all rows what is missing is gathered and taken off the total. Whole
slices are summed once, for whatever number of subsets. torch is loaded only for jobs that repay it.
Shape letters: B subsets, N rows of the corpus, n rows of one block, G slices, C value columns.
"""

import importlib.util
import shutil
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csc_array, csr_array

from grasp.errors import ShapeError
from grasp.predict.row_arrays import F32, F64, Blocks
from grasp.predict.weights import EachSlice, OmittedRows, PackedMasks, SliceShares, Weights

F = NDArray[np.floating[Any]]
Way = Literal["dense", "sparse", "torch"]

# Arrays up to this size are held in memory over all blocks of subsets; larger ones are read again for each.
HELD_BYTES = 256 << 20
# Numbers that are worked on at once: what is made of them fits the cache, and memory that is used again and again.
BLOCK_NUMBERS = 1 << 16
# What a sum over weights costs in nanoseconds of one core: a column of a row that is gathered, by scipy; an entry that
# is set in a dense matrix; a cell of that matrix, and its product with a column.
GATHERED, SET, CELL, MULTIPLIED = 2.0, 40.0, 4.0, 0.2
# Multiply-adds of one block from which torch repays its packing; it gathers twice as fast.
LARGE = 50_000_000
GATHERED_BY_TORCH = GATHERED / 2
# Multiply-adds of all blocks from which loading torch, some seconds, is repaid as well.
REPAID = 3_000_000_000
# Multiply-adds of one dense block from which loading torch and moving the block to a GPU are repaid.
LARGE_DENSE = 20_000_000_000
# Rows of masks that are unpacked and multiplied at once.
MASK_ROWS = 4096


class RowSums:
    """Rows that are summed over subsets.

    Results are float64; where rows are added up in float32 (the torch way, and masks) it is a few thousand of them at
    most: within 2e-6 of sum_i |w_i x_i| by torch, 3e-5 of masks, whether the values are held or not.
    """

    def __init__(self, blocks: Callable[[], Blocks], n_rows: int, width: int, *, held_NC: F32 | None = None) -> None:
        self._blocks, self._shape = blocks, (n_rows, width)
        if held_NC is None and n_rows * width * 4 <= HELD_BYTES:
            held_NC = np.empty(self._shape, dtype=np.float32)
            for start, block in blocks():
                held_NC[start : start + len(block)] = block
        self.held_NC = held_NC  # the values themselves, where they are in memory
        self.way: Way | None = None  # None: the one that the shape favours
        self._packed: Any = None  # a sweep_torch.PackedValues, once one is needed
        self._gathered = 0  # multiply-adds of entries so far
        self._total_C: F64 | None = None
        self._codes_N: NDArray[np.integer[Any]] | None = None
        self._sums_GC: F64 = np.empty((0, 0))  # of the slices that `_codes_N` names

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
        if isinstance(weights, SliceShares):
            return np.asarray(weights.share_BG @ self._of_slices(weights))
        if self.held_NC is None or isinstance(weights, EachSlice):
            parts, out_BC = BlockSums(weights), np.zeros((weights.shape[0], self._shape[1]))
            for start, block in self.blocks():
                out_BC += parts.product(start, block)
            return out_BC
        if isinstance(weights, OmittedRows):
            if self._total_C is None:
                self._total_C = self.held_NC.sum(axis=0, dtype=np.float64)
            return self._total_C - self.sums(weights.omitted_BN)
        if isinstance(weights, PackedMasks):
            return BlockSums(weights).product(0, self.held_NC)
        return self._entries(weights, self.held_NC)

    def _of_slices(self, weights: SliceShares) -> F64:
        """(G, C), kept from one block of subsets to the next: a union of slices costs O(G), not O(N)."""
        if self._codes_N is not weights.codes_N:
            self._codes_N, self._sums_GC = weights.codes_N, self.sums(weights.slices)
        return self._sums_GC

    def _entries(self, weights_BN: csr_array, values_NC: F32) -> F64:
        n_subsets, n_rows = weights_BN.shape
        self._gathered += weights_BN.nnz * self._shape[1]
        with_torch = "torch" in sys.modules or (self._gathered >= REPAID and torch_installed())
        way = self.way or plan(weights_BN.nnz, n_subsets, n_rows, self._shape[1], with_torch=with_torch)
        if way == "torch":
            from grasp.predict import sweep_torch  # noqa: PLC0415 - torch is loaded for large jobs only

            self._packed = self._packed or sweep_torch.PackedValues.pack(values_NC, sweep_torch.device())
            return sweep_torch.sums(self._packed, weights_BN)
        if way == "sparse" and weights_BN.nnz < n_rows:
            return _gathered(weights_BN, values_NC)
        block, out_BC = BlockSums(weights_BN, dense=way == "dense"), np.zeros((n_subsets, self._shape[1]))
        for start in range(0, n_rows, MASK_ROWS):
            out_BC += block.product(start, values_NC[start : start + MASK_ROWS])
        return out_BC


class BlockSums:
    """The same for B subsets over rows that arrive in blocks: (B, C) float64, the corpus is never in memory.

    What weights name is multiplied in the form that they have: masks as they are unpacked, omitted rows as what is
    taken off the sum of all rows, slices once for all subsets.
    """

    def __init__(self, weights: Weights, *, dense: bool | None = None) -> None:
        """Bind the weights.

        Args:
            dense: multiply sparse weights as dense ones, or not; None: where it pays.
        """
        self._weights, self._dense = weights, dense
        self._by_row: csc_array | None = None
        if isinstance(weights, csr_array | OmittedRows):
            self._by_row = (weights.omitted_BN if isinstance(weights, OmittedRows) else weights).tocsc()
        self.shape = weights.shape

    def product(self, start: int, values_nC: F) -> F64:
        """The part that rows [start, start + n) add.

        Masks are multiplied in float32, large ones on a GPU where there is one, and added up in float64 every MASK_ROWS
        rows: within 3e-5 of sum_i |x_i|, whoever multiplies. All else is float64.
        """
        stop = start + len(values_nC)
        if stop > self.shape[1]:
            raise ShapeError(f"sums: rows {start} to {stop} were given for a corpus of {self.shape[1]} rows")
        weights = self._weights
        if isinstance(weights, PackedMasks):
            return _masked(weights, start, values_nC)
        wide_nC: F64 = np.asarray(values_nC, dtype=np.float64)
        if isinstance(weights, EachSlice):
            return weights.product(start, wide_nC)
        if isinstance(weights, SliceShares):
            return np.asarray(weights.share_BG @ weights.slices.product(start, wide_nC))
        part_BC = self._entries(start, wide_nC)
        return np.asarray(wide_nC.sum(axis=0) - part_BC) if isinstance(weights, OmittedRows) else part_BC

    def _entries(self, start: int, values_nC: F64) -> F64:
        assert self._by_row is not None
        part = self._by_row[:, start : start + len(values_nC)]
        dense = self._dense
        if dense is None:
            dense = dense_pays(part.nnz, part.shape[0] * len(values_nC), values_nC.shape[1])
        return np.asarray(part.toarray() @ values_nC if dense else part @ values_nC)


def block_rows(width: int) -> int:
    """Rows that are worked on at once."""
    return max(1, BLOCK_NUMBERS // max(1, width))


def plan(entries: int, n_subsets: int, n_rows: int, width: int, *, with_torch: bool) -> Way:
    """How to sum a block with `entries` nonzero weights."""
    by_torch = with_torch and entries * width >= LARGE
    if dense_pays(entries, n_subsets * n_rows, width, gathered=GATHERED_BY_TORCH if by_torch else GATHERED):
        return "dense"
    return "torch" if by_torch else "sparse"


def dense_pays(entries: int, cells: int, width: int, *, gathered: float = GATHERED) -> bool:
    """Whether a dense product with `width` columns beats gathering the rows of `entries` nonzero weights."""
    return entries * (gathered * width - SET) > cells * (CELL + MULTIPLIED * width)


def torch_installed() -> bool:
    """Whether the fast way is there; loads nothing."""
    return importlib.util.find_spec("torch") is not None


def cuda_backend(multiply_adds: int) -> ModuleType | None:
    """`grasp.predict.sweep_torch` where the job is large and torch sees a CUDA device, else None.

    On a machine without a driver torch is not loaded to be asked.
    """
    if multiply_adds < LARGE_DENSE or not torch_installed():
        return None
    if "torch" not in sys.modules and shutil.which("nvidia-smi") is None:
        return None
    from grasp.predict import sweep_torch  # noqa: PLC0415 - torch is loaded for large jobs only

    return sweep_torch if sweep_torch.device() == "cuda" else None


def _gathered(weights_BN: csr_array, values_NC: F32) -> F64:
    """By scipy, which widens what it multiplies with: so only the rows that are used."""
    used_n, column = np.unique(weights_BN.indices, return_inverse=True)
    weights_Bn = csr_array((weights_BN.data, column, weights_BN.indptr), shape=(weights_BN.shape[0], len(used_n)))
    return np.asarray(weights_Bn @ values_NC[used_n], dtype=np.float64)


def _masked(masks: PackedMasks, start: int, values_nC: F) -> F64:
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
