"""Hashed tf-idf features of rows, from token ids and pairs of adjacent ids, and ridge regression on them.

Start with `TokenFeatures`.

A token or pair in slot v adds idf_v to feature v of the row. The row is divided by the root of the sum of idf^2 over
its tokens and pairs, which is about its Euclidean norm (equal to it if no slot occurs twice). A linear function of the
features is therefore a sum over tokens and pairs, and needs no matrix.
Shape letters: n rows of a block, S rows of a sample, L tokens, V slots, F tables, C and J columns.
"""

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array

from grasp.arrays import F32, F64, I32, I64

BITS = 15
SLOTS = 1 << BITS
PENALTY = 30.0  # of the ridge regression; rows have about unit norm
STEPS = 12  # of conjugate gradients
# Odd multipliers for hashing: multiplication by an odd number is a bijection modulo 2^32.
_MULTIPLIER, _PAIR_MULTIPLIER, _MIX_MULTIPLIER = np.uint32(0x9E3779B1), np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)


def slots(flat_ids: I32, offsets: I64) -> tuple[I32, I32]:
    """Return the slot of every token, (L,), and of the pair that ends with it, (L,); -1 for the first of a row.

    Args:
        flat_ids: token ids of all rows, (L,).
        offsets: start of each row in `flat_ids`, and the end of the last one, (n + 1,).
    """
    # Multiplicative (Fibonacci) hashing: products wrap modulo 2^32, and their upper bits, which depend on all bits of
    # the id, are the slot. The shift mixes upper bits into lower ones before the second multiplication of a pair.
    ids_L = flat_ids.astype(np.uint32)
    token_L = (ids_L * _MULTIPLIER) >> np.uint32(32 - BITS)
    pair_L = np.full(len(ids_L), -1, dtype=np.int32)
    mixed = (ids_L[:-1] * _PAIR_MULTIPLIER + ids_L[1:]) * _MIX_MULTIPLIER
    mixed ^= mixed >> np.uint32(15)
    pair_L[1:] = (mixed * _MULTIPLIER) >> np.uint32(32 - BITS)
    starts = offsets[:-1]
    pair_L[starts[starts < len(pair_L)]] = -1  # an empty row at the end starts behind the last token
    return token_L.astype(np.int32), pair_L


@dataclass(frozen=True, slots=True)
class TokenFeatures:
    """Hashed tf-idf with fixed document frequencies: idf_v = ln((1 + n) / (1 + rows with slot v)) + 1."""

    idf_V: F32

    @classmethod
    def fit(cls, flat_ids: I32, offsets: I64) -> "tuple[TokenFeatures, csr_array]":
        """Count document frequencies, and return the features of the same rows, (n, V).

        Args:
            flat_ids: token ids of all rows, (L,).
            offsets: start of each row in `flat_ids`, and the end of the last one, (n + 1,).
        """
        n_rows, lengths = len(offsets) - 1, np.diff(offsets)
        slot_L2 = np.stack(slots(flat_ids, offsets), axis=1).ravel()
        slot_L2 = slot_L2[slot_L2 >= 0]
        indptr = np.concatenate([[0], np.cumsum(2 * lengths - (lengths > 0))])  # l tokens and l - 1 pairs a row
        rows = csr_array((np.ones(len(slot_L2), np.float32), slot_L2, indptr), shape=(n_rows, SLOTS))
        rows.sum_duplicates()
        n_rows_V = np.bincount(rows.indices, minlength=SLOTS)  # duplicates are summed, so a row counts once per slot
        features = cls((np.log((1 + n_rows) / (1 + n_rows_V)) + 1).astype(np.float32))
        square_n = rows @ features.idf_V**2
        inverse_n = 1.0 / np.sqrt(np.where(square_n > 0, square_n, np.inf))
        rows.data *= features.idf_V[rows.indices] * np.repeat(inverse_n, np.diff(rows.indptr)).astype(np.float32)
        return features, rows

    def apply(self, flat_ids: I32, offsets: I64, table_FVC: F32, table_n: I64) -> F64:
        """Multiply the features of each row by a table of coefficients.

        Args:
            flat_ids: token ids of all rows, (L,).
            offsets: start of each row in `flat_ids`, and the end of the last one, (n + 1,).
            table_FVC: coefficients; row i is multiplied by `table_FVC[table_n[i]]`.
            table_n: table of each row, (n,).

        Returns:
            (n, C); 0 for empty rows.
        """
        # Column 0 accumulates the squared norm, the others idf times coefficients, so that every token is looked up
        # once per column and no feature matrix is built. The last slot is 0, for -1.
        n_tables, _, n_columns = table_FVC.shape
        value_FVC = np.zeros((n_tables, SLOTS + 1, n_columns + 1), dtype=np.float32)
        value_FVC[:, :-1, 0] = self.idf_V**2
        value_FVC[:, :-1, 1:] = self.idf_V[:, None] * table_FVC
        value_CS = np.ascontiguousarray(value_FVC.reshape(-1, n_columns + 1).T)
        lengths = np.diff(offsets)
        nonempty = np.flatnonzero(lengths)
        out_nC = np.zeros((len(lengths), n_columns))
        if not len(nonempty):
            return out_nC
        base_L = np.repeat((table_n * (SLOTS + 1)).astype(np.int32), lengths)
        sum_Cn = np.zeros((n_columns + 1, len(nonempty)))
        for slot_L in slots(flat_ids, offsets):
            place_L = np.where(slot_L < 0, SLOTS, slot_L) + base_L
            for c, value_S in enumerate(value_CS):
                # empty rows are left out: `reduceat` returns the element at the offset for an empty range
                sum_Cn[c] += np.add.reduceat(value_S[place_L], offsets[nonempty], dtype=np.float64)
        out_nC[nonempty] = (sum_Cn[1:] / np.sqrt(sum_Cn[0])).T
        return out_nC


def ridge(x_SV: csr_array, y_SJ: F64) -> tuple[F32, F64]:
    """Fit a ridge regression with an intercept by conjugate gradients on the normal equations.

    Minimize |(X - mean) W - (Y - mean)|^2 + PENALTY |W|^2. X is sparse, and centring it would make it dense, so that
    products use (X - 1 m^T) W = X W - 1 (m^T W). The columns of Y are solved at once, each with its own step sizes.

    Args:
        x_SV: features.
        y_SJ: values to predict.

    Returns:
        Coefficients W, (V, J), and intercepts, (J,).
    """
    mean_V = np.asarray(x_SV.mean(axis=0), dtype=np.float32)
    mean_J = y_SJ.mean(axis=0)
    x_VS = csr_array(x_SV.T)

    def multiply_transposed(r_SJ: F32) -> F32:
        """Return (X - 1 m^T)^T r."""
        return x_VS @ r_SJ - np.outer(mean_V, r_SJ.sum(axis=0))

    residual_VJ = multiply_transposed((y_SJ - mean_J).astype(np.float32))
    weight_VJ, direction_VJ = np.zeros_like(residual_VJ), residual_VJ.copy()
    square_J = np.square(residual_VJ, dtype=np.float64).sum(axis=0)
    for _ in range(STEPS):
        # product = ((X - 1 m^T)^T (X - 1 m^T) + PENALTY I) direction
        product_VJ = multiply_transposed(x_SV @ direction_VJ - mean_V @ direction_VJ) + PENALTY * direction_VJ
        curvature_J = (direction_VJ * product_VJ).sum(axis=0, dtype=np.float64)
        step_J = np.divide(square_J, curvature_J, out=np.zeros_like(square_J), where=curvature_J > 0)
        weight_VJ += (step_J * direction_VJ).astype(np.float32)
        residual_VJ -= (step_J * product_VJ).astype(np.float32)
        previous_J, square_J = square_J, np.square(residual_VJ, dtype=np.float64).sum(axis=0)
        ratio_J = np.divide(square_J, previous_J, out=np.zeros_like(square_J), where=previous_J > 0)
        direction_VJ = residual_VJ + ratio_J.astype(np.float32) * direction_VJ
    return weight_VJ, mean_J - mean_V @ weight_VJ
