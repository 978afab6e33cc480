"""Many subsets at once, as one matrix of weights: a subset a line, a row of the corpus a column.

Shape letters: B subsets, N rows of the corpus."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from grasp.errors import ShapeError, SubsetError
from grasp.predict.weights import OmittedRows, PackedMasks, Weights, as_csr, canonical, sizes

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
        weights: (B, N), finite and >= 0, each row with a positive sum; in the form that suits their shape. Entries of a
            csr_array that name a row twice are added up, as scipy has it.
    """

    subset_ids: tuple[str, ...]
    weights: Weights

    def __post_init__(self) -> None:
        if self.weights.shape[0] != len(self.subset_ids):
            raise ShapeError(f"block: {len(self.subset_ids)} subset_ids for weights of shape {self.weights.shape}")
        if isinstance(self.weights, csr_array):
            object.__setattr__(self, "weights", canonical(self.weights))

    @property
    def weights_BN(self) -> csr_array:  # noqa: N802 - a shape suffix
        """(B, N) float64 without stored zeros; made anew at every use where the block has another form."""
        return as_csr(self.weights)

    @property
    def sizes_B(self) -> NDArray[np.int64]:  # noqa: N802 - a shape suffix
        """Rows with a weight above zero, per subset."""
        return sizes(self.weights)

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


@dataclass(frozen=True, slots=True)
class _MaskedRows:
    """One subset as bits, one a row: an eighth of a byte where an index would be eight."""

    subset_id: str
    bits_N: NDArray[np.uint8]


_Compacted = WeightedRows | MissingRows | _MaskedRows


def stack(subsets: Sequence[WeightedRows], n_rows: int) -> SubsetBlock:
    """One block of entries out of single subsets; refuses weights that are not finite, negative, or all zero."""
    weights_BN = _entries(subsets, [_checked_weights(item) for item in subsets], n_rows)
    weights_BN.eliminate_zeros()
    return _block(subsets, weights_BN)


def in_blocks(subsets: Iterable[WeightedRows | MissingRows], n_rows: int, block: int) -> Iterator[SubsetBlock]:
    """Group single subsets, in their order, into blocks of one form each.

    A block has at most `block` subsets and takes the memory of MAX_BLOCK_ENTRIES entries.
    """
    if block < 1:
        raise SubsetError(f"block: got {block}, expected at least 1 subset in a block")
    pending: list[_Compacted] = []
    entries = 0
    for item in subsets:
        compacted = _compacted(item, n_rows)
        size = _size(compacted)
        other = bool(pending) and type(pending[0]) is not type(compacted)
        if pending and (other or len(pending) == block or entries + size > MAX_BLOCK_ENTRIES):
            yield _stacked(pending, n_rows)
            pending, entries = [], 0
        pending.append(compacted)
        entries += size
    if pending:
        yield _stacked(pending, n_rows)


def one_subset(subset_id: str, mask_N: NDArray[np.bool_], weights: NDArray[np.float64] | None = None) -> SubsetBlock:
    """A block of the one subset that `mask_N` retains; an empty mask is refused."""
    kept = WeightedRows(subset_id, np.flatnonzero(mask_N), weights)
    return next(in_blocks([kept], len(mask_N), 1))


def _compacted(item: WeightedRows | MissingRows, n_rows: int) -> _Compacted:
    """The subset in the form that its share of the corpus suggests."""
    if isinstance(item, MissingRows):
        missing = len(item.row_index)
        if missing < n_rows * OMITTED_SHARE:
            return item
        mask_N = np.ones(n_rows, dtype=np.bool_)
        mask_N[item.row_index] = False
        return _compacted(WeightedRows(item.subset_id, np.flatnonzero(mask_N)), n_rows)
    kept = len(item.row_index)
    if item.weights is not None or kept <= max(PACKED_ROWS, n_rows * PACKED_SHARE):
        return item
    mask_N = _mask(item.row_index, n_rows)
    if n_rows - kept < n_rows * OMITTED_SHARE:
        return MissingRows(item.subset_id, np.flatnonzero(~mask_N))
    return _MaskedRows(item.subset_id, np.packbits(mask_N))


def _stacked(items: Sequence[_Compacted], n_rows: int) -> SubsetBlock:
    """One block out of subsets of one form."""
    masked = [item for item in items if isinstance(item, _MaskedRows)]
    if masked:
        return _block(masked, PackedMasks(np.stack([item.bits_N for item in masked]), n_rows))
    missing = [item for item in items if isinstance(item, MissingRows)]
    if missing:
        return _block(missing, OmittedRows(_entries(missing, [np.ones(len(m.row_index)) for m in missing], n_rows)))
    return stack([item for item in items if isinstance(item, WeightedRows)], n_rows)


def _block(items: Sequence[_Compacted], weights: Weights) -> SubsetBlock:
    return SubsetBlock(tuple(item.subset_id for item in items), weights)


def _entries(
    items: Sequence[WeightedRows | MissingRows], values: Sequence[NDArray[np.float64]], n_rows: int
) -> csr_array:
    indptr = np.concatenate([[0], np.cumsum([len(item.row_index) for item in items])])
    indices = np.concatenate([item.row_index for item in items])
    return csr_array((np.concatenate(values), indices, indptr), shape=(len(items), n_rows))


def _size(item: _Compacted) -> int:
    """Memory, in entries of 12 bytes."""
    return len(item.bits_N) // 12 if isinstance(item, _MaskedRows) else len(item.row_index)


def _mask(row_index: NDArray[np.int64], n_rows: int) -> NDArray[np.bool_]:
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
