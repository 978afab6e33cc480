"""The pair-shuffled control of the paper: K_pair with similarities that are assigned to other pairs of rows.

The geometry of a subset with weights w is ``K_raw = |sum_i w_i phi_i|^2 = K_self + K_pair`` with the sketches phi_i of
its rows (`subset_sums`). If a predictor with shuffled pairs is as good as the full one, its pair geometry carries no
information. Start with `ShuffledPairs`.

Shape letters: B subsets, N rows, D sketch width.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grasp.arrays import F32, F64
from grasp.errors import ShapeError
from grasp.seeds import stream

MAX_ROWS = 12_000  # 4 bytes per pair of rows: 288 MB
BLOCK_ROWS = 256


@dataclass(frozen=True, slots=True)
class ShuffledPairs:
    """Pair similarities G_ij = <phi_i, phi_j>, i < j, reassigned to pairs by one fixed random permutation.

    Preserves the multiset of pair similarities exactly and destroys their assignment to pairs. The result is not a Gram
    matrix: K_pair may be lower than -K_self, i.e. K_raw negative.
    """

    n_rows: int
    condensed: F32  # the upper triangle of the matrix, row by row, filled with the similarities in random order

    @classmethod
    def draw(cls, sketch_ND: NDArray[np.floating], *, seed: int) -> "ShuffledPairs":
        """Permute the pair similarities of a sketch. Memory: 2 N^2 bytes; time: O(N^2 D).

        Raises:
            ShapeError: more than MAX_ROWS rows.
        """
        sketch_ND = np.asarray(sketch_ND, dtype=np.float32)
        n_rows = len(sketch_ND)
        if n_rows > MAX_ROWS:
            raise ShapeError(f"shuffled pairs: got {n_rows} rows, expected at most {MAX_ROWS}")
        condensed = np.empty(n_rows * (n_rows - 1) // 2, dtype=np.float32)
        end = 0
        for first_row in range(0, n_rows, BLOCK_ROWS):
            block = sketch_ND[first_row : first_row + BLOCK_ROWS] @ sketch_ND.T
            for i, row in enumerate(block, start=first_row):
                begin, end = end, end + n_rows - 1 - i
                condensed[begin:end] = row[i + 1 :]
        stream(seed, "fidelity", "pair-shuffled").shuffle(condensed)
        return cls(n_rows, condensed)

    def k_pair(self, weights_BN: NDArray[np.floating]) -> F64:
        """Return K_pair = 2 sum_{i<j} w_i w_j G_shuffled(ij), (B,). Source: the paper's pair-shuffled control."""
        weights_BN = np.asarray(weights_BN, dtype=np.float64)
        if weights_BN.shape[1] != self.n_rows:
            raise ShapeError(f"shuffled pairs: weights {weights_BN.shape} for {self.n_rows} rows")
        total_B = np.zeros(len(weights_BN))
        end = 0
        for first_row in range(0, self.n_rows, BLOCK_ROWS):
            last_row = min(first_row + BLOCK_ROWS, self.n_rows)
            block = np.zeros((last_row - first_row, self.n_rows))  # rows of the upper triangle; 0 at j <= i
            for i in range(first_row, last_row):
                begin, end = end, end + self.n_rows - 1 - i
                block[i - first_row, i + 1 :] = self.condensed[begin:end]
            total_B += np.einsum("bi,bi->b", weights_BN[:, first_row:last_row], weights_BN @ block.T)
        return np.asarray(2.0 * total_B)
