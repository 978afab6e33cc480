"""Rows as bags of token ids and of pairs of neighbouring ids, hashed: what a ridge regression on text reads.

A token or pair in slot v adds idf_v to the row's feature v, and the row is divided by the root of the sum of idf^2 over
its tokens and pairs: tf-idf of about unit length. No step needs to know which slots of a row coincide, so a linear
function of the features is a sum of table entries, one a token and pair.
Shape letters: n rows of a block, L tokens, V slots, C functions.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array

from grasp.arrays import F32, F64, I32, I64

BITS = 15
SLOTS = 1 << BITS
AT_ONCE = 1 << 20  # tokens whose slots are in memory together
_FIRST, _SECOND, _SPREAD = np.uint32(0x9E3779B1), np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)  # odd


def slots(flat_ids: I32, offsets: I64) -> tuple[I32, I32]:
    """Slot of every token, (L,), and of the pair that it ends, (L,); -1 for a row's first token, which ends none."""
    first = flat_ids.astype(np.uint32)
    token_L = (first * _FIRST) >> np.uint32(32 - BITS)
    pair_L = np.full(len(first), -1, dtype=np.int32)
    mixed = (first[:-1] * _SECOND + first[1:]) * _SPREAD
    mixed ^= mixed >> np.uint32(15)
    pair_L[1:] = (mixed * _FIRST) >> np.uint32(32 - BITS)
    begins = offsets[:-1]
    pair_L[begins[begins < len(pair_L)]] = -1
    return token_L.astype(np.int32), pair_L


def _pieces(flat_ids: I32, offsets: I64) -> Iterator[tuple[slice, I32, I64]]:
    """Rows in pieces of some AT_ONCE tokens: which rows, their ids, their offsets."""
    start, n_rows = 0, len(offsets) - 1
    while start < n_rows:
        stop = max(start + 1, int(np.searchsorted(offsets, offsets[start] + AT_ONCE, side="right")) - 1)
        piece_offsets = offsets[start : stop + 1]
        yield slice(start, stop), flat_ids[piece_offsets[0] : piece_offsets[-1]], piece_offsets - piece_offsets[0]
        start = stop


@dataclass(frozen=True, slots=True)
class TokenFeatures:
    """Hashed tf-idf, with the document frequencies of some rows."""

    idf_V: F32

    @classmethod
    def from_rows(cls, flat_ids: I32, offsets: I64) -> "TokenFeatures":
        """idf_v = ln((1 + n) / (1 + rows with slot v)) + 1."""
        n_rows, seen_V = len(offsets) - 1, np.zeros(SLOTS)
        for rows, ids, piece_offsets in _pieces(flat_ids, offsets):
            row_L = np.repeat(np.arange(rows.stop - rows.start, dtype=np.int64), np.diff(piece_offsets))
            for slot_L in slots(ids, piece_offsets):
                known = slot_L >= 0
                key = np.unique(row_L[known] * SLOTS + slot_L[known])
                seen_V += np.bincount(key % SLOTS, minlength=SLOTS)
        return cls((np.log((1 + n_rows) / (1 + np.minimum(seen_V, n_rows))) + 1).astype(np.float32))

    def matrix(self, flat_ids: I32, offsets: I64) -> csr_array:
        """Features of rows, (n, V)."""
        row_L = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        parts = [(row_L[slot_L >= 0], slot_L[slot_L >= 0]) for slot_L in slots(flat_ids, offsets)]
        rows, columns = (np.concatenate(each) for each in zip(*parts, strict=True))
        features = csr_array((self.idf_V[columns], (rows, columns)), shape=(len(offsets) - 1, SLOTS))
        features.sum_duplicates()
        features.data *= np.repeat(self._inverse_norm(flat_ids, offsets), np.diff(features.indptr)).astype(np.float32)
        return features

    def apply(self, flat_ids: I32, offsets: I64, table_FVC: F32, fold_n: I64) -> F64:
        """Linear functions of the features, (n, C): row i of `matrix` times `table[fold_i]`, without a matrix."""
        n_folds, _, n_columns = table_FVC.shape
        value_FVC = np.zeros((n_folds, SLOTS + 1, n_columns + 1), dtype=np.float32)  # a last slot of zeros, for -1
        value_FVC[:, :-1, 0] = self.idf_V**2
        value_FVC[:, :-1, 1:] = self.idf_V[:, None] * table_FVC
        columns = np.ascontiguousarray(value_FVC.reshape(-1, n_columns + 1).T)
        out_nC = np.zeros((len(offsets) - 1, n_columns))
        for rows, ids, piece_offsets in _pieces(flat_ids, offsets):
            lengths, fold = np.diff(piece_offsets), fold_n[rows]
            filled = np.flatnonzero(lengths)
            if not len(filled):
                continue
            sum_Cn = np.zeros((n_columns + 1, len(filled)))
            base_L = np.repeat((fold * (SLOTS + 1)).astype(np.int32), lengths)
            for slot_L in slots(ids, piece_offsets):
                place_L = np.where(slot_L < 0, SLOTS, slot_L) + base_L
                for c, value_V in enumerate(columns):
                    sum_Cn[c] += np.add.reduceat(value_V[place_L], piece_offsets[filled], dtype=np.float64)
            out_nC[rows.start + filled] = (sum_Cn[1:] / np.sqrt(sum_Cn[0])).T
        return out_nC

    def _inverse_norm(self, flat_ids: I32, offsets: I64) -> F64:
        total_n = np.zeros(len(offsets) - 1)
        filled = np.flatnonzero(np.diff(offsets))
        for slot_L in slots(flat_ids, offsets):
            square_L = np.append(self.idf_V**2, np.float32(0))[slot_L]
            if len(filled):
                total_n[filled] += np.add.reduceat(square_L, offsets[filled], dtype=np.float64)
        return 1.0 / np.sqrt(np.where(total_n > 0, total_n, np.inf))
