"""Gather-sum over rows in memory: sum_i w_i x_i for many subsets, by whichever way the shape favours.

Few rows of each subset are gathered: by scipy's sparse product (small jobs; float64) or by `sweep_torch` (large jobs,
where torch is installed; on a GPU if it sees one). Many rows are a dense product, of bits where weights come packed,
on the GPU too. Of nearly all rows what is missing is gathered and taken off the total. Whole slices are summed once,
for whatever number of subsets.
Shape letters: B subsets, N rows, G slices, C value columns.
"""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from grasp.errors import ShapeError
from grasp.predict.accelerator import torch_installed
from grasp.predict.geometry import GATHERED, MASK_ROWS, BlockSums, dense_pays
from grasp.predict.weights import OmittedRows, SliceShares, Weights

F64 = NDArray[np.float64]
F = NDArray[np.floating[Any]]
Way = Literal["dense", "sparse", "torch"]

# Multiply-adds of one block from which the other backend repays its packing; it gathers twice as fast.
LARGE = 50_000_000
GATHERED_BY_TORCH = GATHERED / 2


def plan(entries: int, n_subsets: int, n_rows: int, width: int, *, torch_installed: bool) -> Way:
    """How to sweep a block with `entries` nonzero weights."""
    by_torch = torch_installed and entries * width >= LARGE
    if dense_pays(entries, n_subsets * n_rows, width, gathered=GATHERED_BY_TORCH if by_torch else GATHERED):
        return "dense"
    return "torch" if by_torch else "sparse"


class Sweep:
    """Values of N rows in memory, ready to be summed over blocks of subsets.

    Results are float64; where rows are added up in float32 (the torch way, and masks) it is a few thousand of them at
    most, and sums are within 2e-6 of sum_i |w_i x_i|.
    """

    def __init__(self, values_NC: NDArray[np.float32], way: Way | None = None) -> None:
        self._values_NC = values_NC
        self._way = way
        self._packed: Any = None  # a sweep_torch.PackedValues, once one is needed
        self._total_C: F64 | None = None

    def sums(self, weights: Weights) -> F64:
        """(B, C) sums of one block of subsets."""
        n_rows, width = self._values_NC.shape
        if weights.shape[1] != n_rows:
            raise ShapeError(f"sweep: weights of shape {weights.shape} for values of {n_rows} rows")
        if isinstance(weights, OmittedRows):
            return self._total() - self.sums(weights.omitted_BN)
        if not isinstance(weights, csr_array):
            return BlockSums(weights).product(0, self._values_NC)
        way = self._way or plan(weights.nnz, weights.shape[0], n_rows, width, torch_installed=torch_installed())
        if way == "dense":
            return self._dense(weights)
        if way == "sparse":
            return self._sparse(weights)
        return self._by_torch(weights)

    def _total(self) -> F64:
        if self._total_C is None:
            self._total_C = self._values_NC.sum(axis=0, dtype=np.float64)
        return self._total_C

    def _sparse(self, weights_BN: csr_array) -> F64:
        """By scipy, which widens what it multiplies with: only the rows that are used, where they are few."""
        n_subsets, n_rows = weights_BN.shape
        if weights_BN.nnz >= n_rows:
            return np.asarray(weights_BN @ self._values_NC, dtype=np.float64)
        used_n, column = np.unique(weights_BN.indices, return_inverse=True)
        weights_Bn = csr_array((weights_BN.data, column, weights_BN.indptr), shape=(n_subsets, len(used_n)))
        return np.asarray(weights_Bn @ self._values_NC[used_n], dtype=np.float64)

    def _dense(self, weights_BN: csr_array) -> F64:
        block, out_BC = BlockSums(weights_BN, dense=True), np.zeros((weights_BN.shape[0], self._values_NC.shape[1]))
        for start in range(0, len(self._values_NC), MASK_ROWS):
            out_BC += block.product(start, self._values_NC[start : start + MASK_ROWS])
        return out_BC

    def _by_torch(self, weights_BN: csr_array) -> F64:
        from grasp.predict import sweep_torch  # noqa: PLC0415 - torch is loaded for large jobs only

        if self._packed is None:
            self._packed = sweep_torch.PackedValues.pack(self._values_NC, sweep_torch.device())
        return sweep_torch.sums(self._packed, weights_BN)


class SliceSums:
    """Sums over slices, kept from one block of subsets to the next: a union of slices costs O(G), not O(N)."""

    def __init__(self) -> None:
        self._codes_N: NDArray[np.integer[Any]] | None = None
        self._sums_GC: F64 = np.empty((0, 0))

    def of(self, weights: SliceShares, over: Callable[[csr_array], F64]) -> F64:
        """(B, C) sums; `over` gives those of the slices themselves, once for each array of codes."""
        if self._codes_N is not weights.codes_N:
            self._sums_GC = over(weights.indicators())
            self._codes_N = weights.codes_N
        return np.asarray(weights.share_BG @ self._sums_GC)
