"""The pair-shuffled control of the paper: K_pair with similarities that are assigned to other pairs of rows.

The geometry of a subset with weights w is ``K_raw = |sum_i w_i phi_i|^2 = K_self + K_pair`` with the sketches phi_i of
its rows (`subset_sums`). If a predictor with shuffled pairs is as good as the full one, its pair geometry carries no
information. Start with `ShuffledPairs`.

Shape letters: B subsets, N rows, D sketch width.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import squareform

from grasp.arrays import F32, F64
from grasp.seeds import stream

MAX_ROWS = 12_000  # 4 bytes per element of the matrix: 576 MB
BLOCK_ROWS = 256


@dataclass(frozen=True, slots=True)
class ShuffledPairs:
    """Pair similarities G_ij = <phi_i, phi_j>, i < j, reassigned to pairs by one fixed random permutation.

    Preserves the multiset of pair similarities exactly and destroys their assignment to pairs. The result is not a Gram
    matrix: K_pair may be lower than -K_self, i.e. K_raw negative.
    """

    gram_NN: F32  # symmetric, 0 on the diagonal

    @classmethod
    def draw(cls, sketch_ND: NDArray[np.floating], *, seed: int) -> "ShuffledPairs":
        """Permute the pair similarities of a sketch. Time: O(N^2 D); memory: 10 N^2 bytes."""
        sketch_ND = np.asarray(sketch_ND, dtype=np.float32)
        assert len(sketch_ND) <= MAX_ROWS
        condensed = squareform(sketch_ND @ sketch_ND.T, force="tovector", checks=False)  # the upper triangle by rows
        stream(seed, "fidelity", "pair-shuffled").shuffle(condensed)
        return cls(squareform(condensed))

    def k_pair(self, weights_BN: F64) -> F64:
        """Return K_pair = sum_{i != j} w_i w_j G_shuffled(ij), (B,). Source: the paper's pair-shuffled control."""
        total_B = np.zeros(len(weights_BN))
        for start in range(0, len(self.gram_NN), BLOCK_ROWS):  # in blocks, since the products are in float64
            block = slice(start, start + BLOCK_ROWS)
            total_B += np.einsum("bi,bi->b", weights_BN[:, block], weights_BN @ self.gram_NN[block].T)
        return total_B
