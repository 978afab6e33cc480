"""How much each row of the corpus counts in each subset: one matrix of subsets x rows, which is never dense.

    w = base + mix @ rows

`rows` is sparse, a subset a line, or packed bits where subsets keep a good part of a large corpus. A `base` of 1 names
subsets by what they leave out; a `mix` gives every row of a slice the weight of the slice, whatever N.
Shape letters: B subsets, N rows of the corpus, G lines of `rows`: slices, or the subsets themselves.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csc_array, csr_array

from grasp.arrays import F32, F64, Blocks
from grasp.errors import ShapeError, SubsetError

_ONES_OF_BYTE = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1)


@dataclass(frozen=True, slots=True)
class PackedMasks:
    """Weights 0 and 1, eight rows a byte, first row in the highest bit; (G, ceil(N / 8)) uint8."""

    bits_GN: NDArray[np.uint8]
    n_rows: int

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.bits_GN), self.n_rows

    def __getitem__(self, columns: tuple[slice, slice]) -> NDArray[np.uint8]:
        """(G, stop - start) zeros and ones of `[:, start:stop]`."""
        start, stop = columns[1].start, columns[1].stop
        first = start // 8
        part = np.unpackbits(self.bits_GN[:, first : -(-stop // 8)], axis=1)
        return part[:, start - 8 * first : stop - 8 * first]


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights w_i >= 0 of the retained side, (B, N).

    Attributes:
        rows: entries named twice are added up, as scipy has it; bits go without `base` and `mix`.
        mix: None: `rows` are the subsets. Else every row of the corpus is in one line of `rows`, with the entry 1, and
            there is no `base`.
        base: 0, or 1: what a row counts that has no entry.
    """

    rows: csr_array | csc_array | PackedMasks
    mix: F64 | None = None  # (B, G)
    base: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.rows, csr_array):
            object.__setattr__(self, "rows", _canonical(self.rows))

    @classmethod
    def from_slices(cls, codes_N: NDArray[np.integer], n_slices: int) -> Self:
        """The slices as subsets, from the slice of each row; `mixed` gives others of the same slices."""
        n_rows = len(codes_N)
        one_each = np.ones(n_rows), codes_N, np.arange(n_rows + 1)
        return cls(csc_array(one_each, shape=(n_slices, n_rows)), np.eye(n_slices))

    def mixed(self, share_BG: Any) -> Self:
        """Subsets that give every row of a slice the weight of the slice."""
        return replace(self, mix=np.asarray(share_BG, dtype=np.float64))

    @property
    def shape(self) -> tuple[int, int]:
        return (self.rows.shape[0] if self.mix is None else len(self.mix)), self.rows.shape[1]

    def mapped(self, function: Callable[..., Any], *given_B: F64) -> Self:
        """function(w, what is given of the subset) in place of w; 0 stays 0, and where `base` is 1, 1 stays 1."""
        if isinstance(self.rows, PackedMasks):
            return self
        if self.mix is not None:
            return replace(self, mix=function(self.mix, *(value_B[:, None] for value_B in given_B)))
        lines = self.rows.tocsr()
        of_entries = (np.repeat(value_B, np.diff(lines.indptr)) for value_B in given_B)
        values = function(self.base + lines.data, *of_entries) - self.base
        return replace(self, rows=csr_array((values, lines.indices, lines.indptr), lines.shape))

    def total(self, function: Callable[[F64], F64]) -> F64:
        """Sum of function(w_i) over the rows of the corpus, (B,)."""
        n_rows, outside = self.shape[1], function(np.asarray(self.base))
        if isinstance(self.rows, PackedMasks):
            kept_B = np.array([_ONES_OF_BYTE[bits].sum() for bits in self.rows.bits_GN], dtype=np.float64)
            return np.asarray(outside * (n_rows - kept_B) + function(np.asarray(1.0)) * kept_B)
        if self.mix is not None:
            return np.asarray(function(self.mix) @ self.rows.sum(axis=1))
        lines = self.rows.tocsr()
        change = csr_array((function(self.base + lines.data) - outside, lines.indices, lines.indptr), lines.shape)
        return np.asarray(n_rows * outside + change.sum(axis=1), dtype=np.float64)

    @property
    def sums(self) -> F64:
        """Sum of w_i, (B,)."""
        return self.total(lambda weight: weight)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Rows with a weight above zero, (B,)."""
        return self.total(np.sign).astype(np.int64)

    @property
    def is_plain(self) -> bool:
        """Whether all weights are 0 or 1, so that they are their own squares."""
        if isinstance(self.rows, PackedMasks):
            return True
        return bool(np.isin(self.base + self.rows.data if self.mix is None else self.mix, (0.0, 1.0)).all())

    def csr(self) -> csr_array:
        """The (B, N) matrix without stored zeros, for who needs it whole; 12 bytes an entry."""
        if isinstance(self.rows, csr_array) and self.mix is None and not self.base:
            return self.rows
        found, values = [], []
        for b in range(self.shape[0]):
            if isinstance(self.rows, PackedMasks):
                weight_N = np.unpackbits(self.rows.bits_GN[b], count=self.shape[1]).astype(np.float64)
            elif self.mix is not None:
                weight_N = self.rows.T @ self.mix[b]
            else:
                weight_N = self.base + self.rows[[b]].toarray()[0]
            found.append(np.flatnonzero(weight_N))
            values.append(weight_N[found[-1]])
        indptr = np.concatenate([[0], np.cumsum([len(row) for row in found])])
        return csr_array((np.concatenate(values), np.concatenate(found), indptr), shape=self.shape)


def grouped(codes_N: NDArray[np.integer], n_slices: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows slice by slice, (N,), and how many each slice has, (G,)."""
    short_N = codes_N.astype(np.int16) if n_slices < 1 << 15 else codes_N  # numpy counts 16 bits, and sorts 32
    return np.argsort(short_N, kind="stable"), np.bincount(codes_N, minlength=n_slices)


def _canonical(weights_BN: csr_array) -> csr_array:
    """The same matrix with one entry for a row and none for 0."""
    if weights_BN.has_canonical_format and weights_BN.data.all():
        return weights_BN
    own_BN = weights_BN.copy()
    own_BN.sum_duplicates()
    own_BN.eliminate_zeros()
    return own_BN


Side = Literal["retained", "omitted"]

# Entries of one block: 12 bytes each, so a block stays under half a gigabyte however large its subsets are.
MAX_BLOCK_ENTRIES = 1 << 25
# Sums of weights, of their squares and what they are divided by stay far from the ends of float64.
LEAST_WEIGHT, MOST_WEIGHT = 1e-30, 1e30
WEIGHT_RANGE = f"weights are 0, or from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}"
# 256 subsets of more rows than this would not fit in one block as entries: such a subset is kept as bits, or, where
# less than OMITTED_SHARE of the corpus is missing, by what is missing.
PACKED_ROWS = 1 << 17
PACKED_SHARE = 1 / 16
OMITTED_SHARE = 1 / 16


@dataclass(frozen=True, slots=True)
class SubsetBlock:
    """B subsets of a corpus of N rows, always the RETAINED side, with raw weights w_i (1 by default).

    Attributes:
        subset_ids: names of the B subsets, in the order of the rows of `weights_BN`.
        weights: (B, N), finite and >= 0, each row with a positive sum.
    """

    subset_ids: tuple[str, ...]
    weights: Weights

    def __post_init__(self) -> None:
        if self.weights.shape[0] != len(self.subset_ids):
            raise ShapeError(f"block: {len(self.subset_ids)} subset_ids for weights of shape {self.weights.shape}")

    @property
    def weights_BN(self) -> csr_array:  # noqa: N802 - a shape suffix
        """(B, N) float64 without stored zeros; made anew at every use where the block has another form."""
        return self.weights.csr()

    @property
    def sizes_B(self) -> NDArray[np.int64]:  # noqa: N802 - a shape suffix
        """Rows with a weight above zero, per subset."""
        return self.weights.sizes

    @property
    def n_rows(self) -> int:
        """N, the rows of the corpus."""
        return int(self.weights.shape[1])


@dataclass(frozen=True, slots=True)
class WeightedRows:
    """One subset: its name, the rows it retains (ascending) and their weights (None: all 1)."""

    subset_id: str
    row_index: NDArray[np.int64]
    weights: NDArray[np.float64] | None = None


@dataclass(frozen=True, slots=True)
class MissingRows:
    """One subset named by the rows that it leaves out (ascending); all others have the weight 1."""

    subset_id: str
    row_index: NDArray[np.int64]


def stack(subsets: Sequence[WeightedRows], n_rows: int) -> SubsetBlock:
    """One block of entries out of single subsets; refuses weights that are not finite, negative, or all zero."""
    return _stacked([(item.subset_id, item) for item in subsets], n_rows)


def in_blocks(subsets: Iterable[WeightedRows | MissingRows], n_rows: int, block: int) -> Iterator[SubsetBlock]:
    """Group single subsets, in their order, into blocks of one form each.

    A block has at most `block` subsets and takes the memory of MAX_BLOCK_ENTRIES entries.
    """
    if block < 1:
        raise SubsetError(f"block: got {block}, expected at least 1 subset in a block")
    pending: list[tuple[str, _Compact]] = []
    entries = 0
    for item in subsets:
        own = _compact(item, n_rows)
        size = len(own) // 12 if isinstance(own, np.ndarray) else len(own.row_index)
        other = bool(pending) and type(pending[0][1]) is not type(own)
        if pending and (other or len(pending) == block or entries + size > MAX_BLOCK_ENTRIES):
            yield _stacked(pending, n_rows)
            pending, entries = [], 0
        pending.append((item.subset_id, own))
        entries += size
    if pending:
        yield _stacked(pending, n_rows)


def one_subset(subset_id: str, mask_N: NDArray[np.bool_], weights: NDArray[np.float64] | None = None) -> SubsetBlock:
    """A block of the one subset that `mask_N` retains; an empty mask is refused."""
    kept = WeightedRows(subset_id, np.flatnonzero(mask_N), weights)
    return next(in_blocks([kept], len(mask_N), 1))


_Compact = WeightedRows | MissingRows | NDArray[np.uint8]  # entries of either side, or a bit a row


def _compact(item: WeightedRows | MissingRows, n_rows: int) -> _Compact:
    """The subset in the form that its share of the corpus suggests."""
    named = len(item.row_index)
    if isinstance(item, MissingRows):
        if named < n_rows * OMITTED_SHARE:
            return item
        return _compact(WeightedRows(item.subset_id, np.flatnonzero(~mask_of(item.row_index, n_rows))), n_rows)
    if item.weights is not None or named <= max(PACKED_ROWS, n_rows * PACKED_SHARE):
        return item
    mask_N = mask_of(item.row_index, n_rows)
    if n_rows - named < n_rows * OMITTED_SHARE:
        return MissingRows(item.subset_id, np.flatnonzero(~mask_N))
    return np.packbits(mask_N)


def _stacked(named: Sequence[tuple[str, _Compact]], n_rows: int) -> SubsetBlock:
    """One block out of subsets of one form."""
    ids, items = tuple(name for name, _ in named), [item for _, item in named]
    bits = [item for item in items if isinstance(item, np.ndarray)]
    if bits:
        return SubsetBlock(ids, Weights(PackedMasks(np.stack(bits), n_rows)))
    lines = [item for item in items if not isinstance(item, np.ndarray)]
    values = [
        _checked_weights(item) if isinstance(item, WeightedRows) else -np.ones(len(item.row_index)) for item in lines
    ]
    indptr = np.concatenate([[0], np.cumsum([len(item.row_index) for item in lines])])
    entries = np.concatenate(values), np.concatenate([item.row_index for item in lines]), indptr
    base = 1.0 if isinstance(lines[0], MissingRows) else 0.0
    return SubsetBlock(ids, Weights(csr_array(entries, shape=(len(lines), n_rows)), base=base))


def mask_of(row_index: NDArray[np.int64], n_rows: int) -> NDArray[np.bool_]:
    """Which of all rows are among some, (N,)."""
    mask_N = np.zeros(n_rows, dtype=np.bool_)
    mask_N[row_index] = True
    return mask_N


def _checked_weights(item: WeightedRows) -> NDArray[np.float64]:
    if len(item.row_index) == 0:
        raise SubsetError(f"subset {item.subset_id!r}: names no rows; a subset retains at least one")
    if item.weights is None:
        return np.ones(len(item.row_index))
    weights = np.asarray(item.weights, dtype=np.float64)
    if weights.shape != item.row_index.shape:
        raise ShapeError(
            f"subset {item.subset_id!r}: {weights.shape} weights for {item.row_index.shape} rows; one a row"
        )
    bad = np.flatnonzero(~((weights == 0) | ((weights >= LEAST_WEIGHT) & (weights <= MOST_WEIGHT))))
    if bad.size:
        raise SubsetError(
            f"subset {item.subset_id!r}: row {int(item.row_index[bad[0]])} has weight "
            f"{float(weights[bad[0]])!r} ({bad.size} such); {WEIGHT_RANGE}"
        )
    if weights.sum() <= 0:
        raise SubsetError(f"subset {item.subset_id!r}: its weights sum to 0; at least one must be positive")
    return weights


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
