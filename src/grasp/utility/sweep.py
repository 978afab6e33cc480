"""Gather-sum over rows in memory: sum_i w_i x_i for many subsets, by whichever way the shape favours.

Three ways give the same numbers: a dense product (subsets that hold a good part of the corpus), scipy's sparse
product (small jobs; float64), and `sweep_torch` (large jobs, where torch is installed; float32 accumulation).
Shape letters: B subsets, N rows, C value columns.
"""

import importlib.util
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from grasp.errors import ShapeError
from grasp.utility.geometry import DENSE_SHARE

F64 = NDArray[np.float64]
F = NDArray[np.floating[Any]]
Way = Literal["dense", "sparse", "torch"]

# Multiply-adds of one block from which the other backend repays its packing.
LARGE = 50_000_000
DENSE_ROWS = 4096


def plan(entries: int, n_subsets: int, n_rows: int, width: int, *, torch_installed: bool) -> Way:
    """How to sweep a block with `entries` nonzero weights."""
    if entries > DENSE_SHARE * n_subsets * n_rows:
        return "dense"
    return "torch" if torch_installed and entries * width >= LARGE else "sparse"


class Sweep:
    """Values of N rows in memory, ready to be summed over blocks of subsets.

    Results are float64; the torch way accumulates in float32 and is within 2e-6 of sum_i |w_i x_i| of them.
    """

    def __init__(self, values_NC: NDArray[np.float32], way: Way | None = None) -> None:
        self._values_NC = values_NC
        self._way = way
        self._packed: Any = None  # a sweep_torch.PackedValues, once one is needed

    def sums(self, weights_BN: csr_array) -> F64:
        """(B, C) sums of one block of subsets."""
        n_rows, width = self._values_NC.shape
        if weights_BN.shape[1] != n_rows:
            raise ShapeError(f"sweep: weights of shape {weights_BN.shape} for values of {n_rows} rows")
        way = self._way or plan(weights_BN.nnz, weights_BN.shape[0], n_rows, width, torch_installed=torch_installed())
        if way == "dense":
            return self._dense(weights_BN)
        if way == "sparse":
            return np.asarray(weights_BN @ self._values_NC, dtype=np.float64)
        return self._by_torch(weights_BN)

    def _dense(self, weights_BN: csr_array) -> F64:
        by_row = weights_BN.tocsc()
        out_BC = np.zeros((weights_BN.shape[0], self._values_NC.shape[1]))
        for start in range(0, len(self._values_NC), DENSE_ROWS):
            values = self._values_NC[start : start + DENSE_ROWS].astype(np.float64)
            out_BC += by_row[:, start : start + DENSE_ROWS].toarray() @ values
        return out_BC

    def _by_torch(self, weights_BN: csr_array) -> F64:
        from grasp.utility import sweep_torch  # noqa: PLC0415 - torch is loaded for large jobs only

        if self._packed is None:
            self._packed = sweep_torch.PackedValues.pack(self._values_NC)
        return sweep_torch.sums(self._packed, weights_BN)


def torch_installed() -> bool:
    """Whether the fast way is there; loads nothing."""
    return importlib.util.find_spec("torch") is not None
