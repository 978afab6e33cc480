"""Hashed tf-idf features of rows, from token ids and pairs of adjacent ids, and ridge regression on them.

Scores of some rows are carried over to all rows by their text: `distil`, and replays of new models. A table holds the
coefficients of one fit. In a cross-fit every row is scored by the table of a fit that has not seen it.

With s a token or pair of adjacent tokens of row i, and v(s) its slot by a hash, feature v of the row is

    x_iv = sum_{s: v(s) = v} idf_v / sqrt(sum_s idf_v(s)^2),    idf_v = ln((1 + n) / (1 + number of rows with v)) + 1

The denominator is about the Euclidean norm of the numerators (equal to it if no slot occurs twice). A linear function
with coefficients w is therefore a sum over tokens and pairs, and needs no matrix:

    sum_v w_v x_iv = sum_s w_v(s) idf_v(s) / sqrt(sum_s idf_v(s)^2)

Start with `TokenFeatures`.
Shape letters: n rows of a block, m rows of it that are not empty, S rows of a sample, L tokens, V slots, F tables, C
and J columns, W = F (V + 1) entries of all tables, each with a last slot for missing pairs.
"""

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array

from grasp.arrays import F32, F64, I32, I64

BITS = 15
SLOTS = 1 << BITS
PENALTY = 30.0  # of the ridge regression; rows have about unit norm
STEPS = 12  # of conjugate gradients; a fixed number, so that a fit does not depend on rounding
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
        token_and_pair_slots = np.stack(slots(flat_ids, offsets), axis=1).ravel()  # alternating, row by row
        indices = token_and_pair_slots[token_and_pair_slots >= 0]
        indptr = np.concatenate([[0], np.cumsum(2 * lengths - (lengths > 0))])  # l tokens and l - 1 pairs per row
        x_nV = csr_array((np.ones(len(indices), np.float32), indices, indptr), shape=(n_rows, SLOTS))
        x_nV.sum_duplicates()  # counts of slots, so that a row has each of its slots once
        document_frequency_V = np.bincount(x_nV.indices, minlength=SLOTS)
        features = cls((np.log((1 + n_rows) / (1 + document_frequency_V)) + 1).astype(np.float32))
        square_n = x_nV @ features.idf_V**2
        inverse_n = 1.0 / np.sqrt(np.where(square_n > 0, square_n, np.inf))
        x_nV.data *= features.idf_V[x_nV.indices] * np.repeat(inverse_n, np.diff(x_nV.indptr)).astype(np.float32)
        return features, x_nV

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
        value_CW = np.ascontiguousarray(value_FVC.reshape(-1, n_columns + 1).T)  # C + 1 rows
        lengths = np.diff(offsets)
        nonempty_m = np.flatnonzero(lengths)
        out_nC = np.zeros((len(lengths), n_columns))
        if not len(nonempty_m):
            return out_nC
        table_start_L = np.repeat((table_n * (SLOTS + 1)).astype(np.int32), lengths)
        sum_Cm = np.zeros((n_columns + 1, len(nonempty_m)))
        for slot_L in slots(flat_ids, offsets):  # of tokens, then of pairs
            entry_L = np.where(slot_L < 0, SLOTS, slot_L) + table_start_L
            for c, value_W in enumerate(value_CW):
                # empty rows are left out: `reduceat` returns the element at the offset for an empty range
                sum_Cm[c] += np.add.reduceat(value_W[entry_L], offsets[nonempty_m], dtype=np.float64)
        out_nC[nonempty_m] = (sum_Cm[1:] / np.sqrt(sum_Cm[0])).T
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
