"""sum_i w_i x_i over the rows of an array, for block after block of subsets: held in memory where it fits."""

from collections.abc import Callable

import numpy as np

from grasp.predict.geometry import BlockSums
from grasp.predict.row_arrays import F32, F64, Blocks
from grasp.predict.sweep import SliceSums, Sweep
from grasp.predict.weights import SliceShares, Weights

# Arrays up to this size are held in memory over all blocks of subsets; larger ones are read again for each.
HELD_BYTES = 256 << 20
BLOCK_ROWS = 1 << 16  # of what is held


class RowSums:
    """Rows that are summed over subsets. Held or not, the sums agree to 2e-6 of sum_i |w_i x_i|."""

    def __init__(self, blocks: Callable[[], Blocks], n_rows: int, width: int, *, held_NC: F32 | None = None) -> None:
        self._blocks = blocks
        self._shape = (n_rows, width)
        if held_NC is None and n_rows * width * 4 <= HELD_BYTES:
            held_NC = np.empty(self._shape, dtype=np.float32)
            for start, block in blocks():
                held_NC[start : start + len(block)] = block
        self.held_NC = held_NC  # the values themselves, where they are in memory
        self._sweep = None if held_NC is None else Sweep(held_NC)
        self._slices = SliceSums()

    @classmethod
    def over(cls, values_NC: F32) -> "RowSums":
        """Sums over values that are in memory already."""
        return cls(lambda: iter([(0, values_NC)]), *values_NC.shape, held_NC=values_NC)

    def blocks(self) -> Blocks:
        """The values that are summed, by blocks of rows from first to last."""
        if self.held_NC is None:
            yield from self._blocks()
            return
        for start in range(0, len(self.held_NC), BLOCK_ROWS):
            yield start, self.held_NC[start : start + BLOCK_ROWS]

    def sums(self, weights: Weights) -> F64:
        """(B, C) for one block of subsets."""
        if isinstance(weights, SliceShares):
            return self._slices.of(weights, self.sums)
        if self._sweep is not None:
            return self._sweep.sums(weights)
        parts = BlockSums(weights)
        out_BC = np.zeros((weights.shape[0], self._shape[1]))
        for start, block in self._blocks():
            out_BC += parts.product(start, block)
        return out_BC
