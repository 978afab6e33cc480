"""Row weights of subsets, and weighted sums of row values over subsets.

A block of B subsets is a (B, N) matrix of weights that is never stored densely:

    W_BN = base + mix_BG @ matrix_GN

`matrix` is sparse, or packed bits for subsets that retain a large part of a large corpus. There are three forms:

    mix None, base 0    G = B: the matrix has the weights themselves
    mix None, base 1    G = B: all rows have weight 1, and the matrix has corrections, e.g. -1 for omitted rows
    mix (B, G), base 0  the matrix assigns every row to one of G slices; all rows of a slice have the same weight, so
                        that the cost does not depend on N

Start with `in_blocks`, which groups single subsets into blocks, and `RowSums`, which computes W @ X for values X of
the rows, (N, C). All predictions depend on the rows only through such sums.
Shape letters: B subsets, N rows of the corpus, n rows of one block, G rows of the matrix (slices, or the subsets
themselves), C value columns.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csc_array, csr_array

from grasp.arrays import F32, F64, I64, Blocks, Bool
from grasp.errors import SubsetError

Side = Literal["retained", "omitted"]

# Entries of one block: 12 bytes each, so a block stays under half a gigabyte however large its subsets are.
MAX_BLOCK_ENTRIES = 1 << 25
# With weights in this range, sums of weights and of their squares neither overflow nor underflow in float64.
MIN_WEIGHT, MAX_WEIGHT = 1e-30, 1e30
WEIGHT_RANGE = f"weights are 0, or from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
# 256 subsets of more rows than this would not fit in one block as entries: such a subset is stored as packed bits, or,
# if less than OMITTED_SHARE of the corpus is omitted, by its omitted rows.
PACKED_ROWS = 1 << 17
PACKED_SHARE = 1 / 16
OMITTED_SHARE = 1 / 16

# Arrays up to this size are kept in memory for all blocks of subsets; larger ones are read again for each block.
IN_MEMORY_BYTES = 256 << 20
# Numbers processed at once, so that intermediate arrays fit the CPU cache.
BLOCK_NUMBERS = 1 << 16
# Rows of packed masks that are unpacked and multiplied at once.
MASK_ROWS = 4096

_ONES_OF_BYTE = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1)


@dataclass(frozen=True, slots=True)
class PackedMasks:
    """Weights 0 and 1 as bits, (G, ceil(N / 8)) uint8; the first row is the highest bit."""

    bits_GN: NDArray[np.uint8]
    n_rows: int

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.bits_GN), self.n_rows

    def columns(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Unpack the rows from `start` to `stop`, (G, stop - start) zeros and ones."""
        first = start // 8
        whole_bytes = np.unpackbits(self.bits_GN[:, first : -(-stop // 8)], axis=1)
        return whole_bytes[:, start - 8 * first : stop - 8 * first]


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights w_i >= 0 of the retained side, (B, N).

    Attributes:
        matrix: sparse matrix or packed bits, (G, N); duplicate entries are added up, as in scipy. Packed bits exclude
            `base` and `mix`.
        mix: slice weights, (B, G). Then `matrix` assigns every row of the corpus to one slice with entry 1, and `base`
            is 0. None: the rows of the matrix are the subsets.
        base: weight of a row without an entry, 0 or 1.
    """

    matrix: csr_array | csc_array | PackedMasks
    mix: F64 | None = None  # (B, G)
    base: float = 0.0

    def __post_init__(self) -> None:
        matrix = self.matrix
        if isinstance(matrix, csr_array) and not (matrix.has_canonical_format and matrix.data.all()):
            canonical = matrix.copy()  # one entry per row of the corpus, no stored zeros
            canonical.sum_duplicates()
            canonical.eliminate_zeros()
            object.__setattr__(self, "matrix", canonical)

    @classmethod
    def from_slices(cls, codes_N: NDArray[np.integer], n_slices: int) -> Self:
        """Return the slices as G subsets, from the slice code of each row; see `mixed` for subsets of these slices."""
        n_rows = len(codes_N)
        one_per_column = np.ones(n_rows), codes_N, np.arange(n_rows + 1)  # data, indices, indptr
        return cls(csc_array(one_per_column, shape=(n_slices, n_rows)), np.eye(n_slices))

    def mixed(self, share_BG: Any) -> Self:
        """Return subsets in which every row has the weight of its slice, from slice weights (B, G)."""
        return replace(self, mix=np.asarray(share_BG, dtype=np.float64))

    @property
    def shape(self) -> tuple[int, int]:
        return (self.matrix.shape[0] if self.mix is None else len(self.mix)), self.matrix.shape[1]

    def mapped(self, function: Callable[..., Any], *per_subset_B: F64) -> Self:
        """Apply a function to the weights: function(w, *values of the subset).

        The function must map 0 to 0 and, if `base` is 1, also 1 to 1, because rows without an entry are not changed.
        """
        if isinstance(self.matrix, PackedMasks):
            return self  # all weights are 0 or 1
        if self.mix is not None:
            return replace(self, mix=function(self.mix, *(value_B[:, None] for value_B in per_subset_B)))
        csr = self.matrix.tocsr()
        per_entry = (np.repeat(value_B, np.diff(csr.indptr)) for value_B in per_subset_B)
        values = function(self.base + csr.data, *per_entry) - self.base
        return replace(self, matrix=csr_array((values, csr.indices, csr.indptr), csr.shape))

    def total(self, function: Callable[[F64], F64]) -> F64:
        """Return the sum of function(w_i) over all rows of the corpus, (B,)."""
        n_rows, without_entry = self.shape[1], function(np.asarray(self.base))
        if isinstance(self.matrix, PackedMasks):
            n_ones_B = np.array([_ONES_OF_BYTE[bits].sum() for bits in self.matrix.bits_GN], dtype=np.float64)
            return np.asarray(without_entry * (n_rows - n_ones_B) + function(np.asarray(1.0)) * n_ones_B)
        if self.mix is not None:
            return np.asarray(function(self.mix) @ self.matrix.sum(axis=1))
        csr = self.matrix.tocsr()
        change = csr_array((function(self.base + csr.data) - without_entry, csr.indices, csr.indptr), csr.shape)
        return np.asarray(n_rows * without_entry + change.sum(axis=1), dtype=np.float64)

    @property
    def sums(self) -> F64:
        """Sum of the weights of each subset, (B,)."""
        return self.total(lambda weight: weight)

    @property
    def sizes(self) -> I64:
        """Number of rows with a positive weight, (B,)."""
        return self.total(np.sign).astype(np.int64)

    @property
    def is_binary(self) -> bool:
        """Return whether all weights are 0 or 1 (then w = w^2)."""
        if isinstance(self.matrix, PackedMasks):
            return True
        return bool(np.isin(self.base + self.matrix.data if self.mix is None else self.mix, (0.0, 1.0)).all())

    def csr(self) -> csr_array:
        """Return the (B, N) matrix in CSR format without stored zeros; 12 bytes per entry."""
        if isinstance(self.matrix, csr_array) and self.mix is None and not self.base:
            return self.matrix
        columns, values = [], []
        for b in range(self.shape[0]):
            if isinstance(self.matrix, PackedMasks):
                weight_N = np.unpackbits(self.matrix.bits_GN[b], count=self.shape[1]).astype(np.float64)
            elif self.mix is not None:
                weight_N = self.matrix.T @ self.mix[b]
            else:
                weight_N = self.base + self.matrix[[b]].toarray()[0]
            columns.append(np.flatnonzero(weight_N))
            values.append(weight_N[columns[-1]])
        indptr = np.concatenate([[0], np.cumsum([len(columns_b) for columns_b in columns])])
        return csr_array((np.concatenate(values), np.concatenate(columns), indptr), shape=self.shape)


@dataclass(frozen=True, slots=True)
class SubsetBlock:
    """B named subsets of a corpus of N rows, always the RETAINED side; each has a positive sum of weights."""

    subset_ids: tuple[str, ...]
    weights: Weights

    @property
    def weights_BN(self) -> csr_array:  # noqa: N802 - a shape suffix
        """(B, N) float64 without stored zeros; converted on every access if the block is stored in another form."""
        return self.weights.csr()

    @property
    def sizes_B(self) -> I64:  # noqa: N802 - a shape suffix
        """Number of rows with a positive weight of each subset."""
        return self.weights.sizes


@dataclass(frozen=True, slots=True)
class WeightedRows:
    """One subset: its name, its retained rows in ascending order, and their weights (None: all 1)."""

    subset_id: str
    row_index: I64
    weights: F64 | None = None


def in_blocks(subsets: Iterable[WeightedRows], n_rows: int, block: int = 256) -> Iterator[SubsetBlock]:
    """Group single subsets, in order, into blocks; all subsets of a block have the same storage form.

    A block has at most `block` subsets and at most the memory of MAX_BLOCK_ENTRIES entries.

    Raises:
        SubsetError: a subset without rows, or weights that are not finite or negative.
    """
    names: list[str] = []
    pending: list[_CompressedSubset] = []
    n_entries = 0
    for item in subsets:
        compressed = _compress(item, n_rows)
        size = len(compressed.rows) // (12 if compressed.base is None else 1)  # memory, in entries of 12 bytes
        is_full = len(pending) == block or n_entries + size > MAX_BLOCK_ENTRIES
        if pending and (is_full or pending[0].base != compressed.base):
            yield _stack(names, pending, n_rows)
            names, pending, n_entries = [], [], 0
        names.append(item.subset_id)
        pending.append(compressed)
        n_entries += size
    if pending:
        yield _stack(names, pending, n_rows)


def single_subset(subset_id: str, mask_N: Bool, weights: F64 | None = None) -> SubsetBlock:
    """Return a block with the single subset that `mask_N` retains; raise SubsetError if the mask is empty."""
    subset = WeightedRows(subset_id, np.flatnonzero(mask_N), weights)
    return next(in_blocks([subset], len(mask_N), 1))


@dataclass(frozen=True, slots=True)
class _CompressedSubset:
    """One subset in a storage form of `Weights`: entries of a row of the matrix, or packed bits."""

    base: float | None  # weight of rows without an entry; None: packed bits
    rows: NDArray[Any]  # row positions of the entries; or the bits
    entries: F64  # differences of their weights from the base; empty for packed bits


def _compress(item: WeightedRows, n_rows: int) -> _CompressedSubset:
    """Choose the storage form of a subset by its share of the corpus: entries, omitted rows, or packed bits."""
    if not len(item.row_index):
        raise SubsetError(f"subset {item.subset_id!r}: has no rows; expected at least one")
    if item.weights is None:  # these rows have weight 1, and all others 0
        if len(item.row_index) <= max(PACKED_ROWS, n_rows * PACKED_SHARE):
            return _CompressedSubset(0.0, item.row_index, np.ones(len(item.row_index)))
        mask_N = mask_of(item.row_index, n_rows)
        if n_rows - len(item.row_index) < n_rows * OMITTED_SHARE:
            omitted = np.flatnonzero(~mask_N)
            return _CompressedSubset(1.0, omitted, -np.ones(len(omitted)))
        return _CompressedSubset(None, np.packbits(mask_N), np.empty(0))
    weights = np.asarray(item.weights, dtype=np.float64)
    assert weights.shape == item.row_index.shape
    bad = np.flatnonzero(~((weights == 0) | ((weights >= MIN_WEIGHT) & (weights <= MAX_WEIGHT))))
    if bad.size:
        first = f"row {int(item.row_index[bad[0]])} has weight {float(weights[bad[0]])!r}"
        raise SubsetError(f"subset {item.subset_id!r}: {first} ({bad.size} such); {WEIGHT_RANGE}")
    return _CompressedSubset(0.0, item.row_index, weights)


def _stack(names: Sequence[str], subsets: Sequence[_CompressedSubset], n_rows: int) -> SubsetBlock:
    """Return subsets of the same storage form as one block."""
    base = subsets[0].base
    if base is None:
        return SubsetBlock(tuple(names), Weights(PackedMasks(np.stack([item.rows for item in subsets]), n_rows)))
    indptr = np.concatenate([[0], np.cumsum([len(item.rows) for item in subsets])])
    entries = np.concatenate([item.entries for item in subsets])
    columns = np.concatenate([item.rows for item in subsets])
    matrix = csr_array((entries, columns, indptr), shape=(len(subsets), n_rows))
    return SubsetBlock(tuple(names), Weights(matrix, base=base))


def mask_of(row_index: I64, n_rows: int) -> Bool:
    """Return the boolean mask (N,) of the given row positions."""
    mask_N = np.zeros(n_rows, dtype=np.bool_)
    mask_N[row_index] = True
    return mask_N


class RowSums:
    """Weighted sums W @ X of row values X, (N, C), over subsets; values of up to IN_MEMORY_BYTES are kept in memory.

    Results are float64; see `sums_over`.

    Args:
        blocks: function that yields (first row, values) in row order.
        n_rows: number of rows, N.
        width: number of value columns, C.
        array_NC: the values, if they are in memory already.
    """

    def __init__(self, blocks: Callable[[], Blocks], n_rows: int, width: int, *, array_NC: F32 | None = None) -> None:
        self._blocks, self.n_rows, self.width = blocks, n_rows, width
        if array_NC is None and n_rows * width * 4 <= IN_MEMORY_BYTES:
            array_NC = np.empty((n_rows, width), dtype=np.float32)
            for start, block in blocks():
                array_NC[start : start + len(block)] = block
        self.array_NC = array_NC  # the values, if they are held in memory
        self._slices: Any = None  # the slices that `_sums_GC` belongs to
        self._sums_GC: F64 = np.empty((0, 0))

    @classmethod
    def over(cls, values_NC: F32) -> "RowSums":
        """Create from values that are in memory."""
        return cls(lambda: iter([(0, values_NC)]), *values_NC.shape, array_NC=values_NC)

    def blocks(self) -> Blocks:
        """Yield (first row, values) in blocks of rows, in row order."""
        if self.array_NC is None:
            yield from self._blocks()
            return
        rows = block_rows(self.width)
        for start in range(0, len(self.array_NC), rows):
            yield start, self.array_NC[start : start + rows]

    def dot(self, vector_C: F64) -> F64:
        """Return <x_i, vector> of every row, (N,), block by block, without a float64 copy of all values."""
        return np.concatenate([np.asarray(block @ vector_C, dtype=np.float64) for _, block in self.blocks()])

    def sums(self, weights: Weights) -> F64:
        """Return W @ X, (B, C) float64, for one block of subsets."""
        matrix, values_NC = weights.matrix, self.array_NC
        assert matrix.shape[1] == self.n_rows
        if weights.mix is not None:
            if self._slices is not matrix:  # the next block of the same slices costs O(G), not O(N)
                (self._sums_GC,) = sums_over(self.blocks(), [Weights(matrix)], self.width)
                self._slices = matrix
            return np.asarray(weights.mix @ self._sums_GC)
        if values_NC is None or not isinstance(matrix, csr_array) or matrix.nnz >= self.n_rows or weights.base:
            return sums_over(self.blocks(), [weights], self.width)[0]
        rows, data = (np.split(array, matrix.indptr[1:-1]) for array in (matrix.indices, matrix.data))
        return np.stack([weight_n @ values_NC[row_n] for row_n, weight_n in zip(rows, data, strict=True)])


def sums_over(blocks: Iterable[tuple[int, NDArray[Any]]], subsets: Sequence[Weights], width: int) -> list[F64]:
    """Return W @ X, (B, C) float64, for each of several blocks of subsets, in one pass over the values.

    Packed masks are multiplied in float32, MASK_ROWS rows at a time, and added in float64, with an error of at most
    3e-5 sum_i |x_i|. All other sums are float64.

    Args:
        blocks: (first row, values) in row order.
        subsets: blocks of subsets.
        width: number of value columns, C.
    """
    matrices_GN = [
        weights.matrix if isinstance(weights.matrix, PackedMasks) else weights.matrix.tocsc() for weights in subsets
    ]
    sums_GC = [np.zeros((matrix_GN.shape[0], width)) for matrix_GN in matrices_GN]
    for start, values_nC in blocks:
        stop = start + len(values_nC)
        wide_nC: F64 = np.asarray(values_nC, dtype=np.float64)
        for k, (matrix_GN, weights) in enumerate(zip(matrices_GN, subsets, strict=True)):
            if isinstance(matrix_GN, PackedMasks):
                for first in range(start, stop, MASK_ROWS):
                    last = min(first + MASK_ROWS, stop)
                    values = np.asarray(values_nC[first - start : last - start], dtype=np.float32)
                    sums_GC[k] += matrix_GN.columns(first, last).astype(np.float32) @ values
            else:
                sums_GC[k] += matrix_GN[:, start:stop] @ wide_nC
            if weights.base:
                sums_GC[k] += weights.base * wide_nC.sum(axis=0)
    return [
        sum_GC if weights.mix is None else weights.mix @ sum_GC
        for weights, sum_GC in zip(subsets, sums_GC, strict=True)
    ]


def block_rows(width: int) -> int:
    """Return the number of rows to process at once, for values of `width` columns."""
    return max(1, BLOCK_NUMBERS // max(1, width))
