"""Many subsets at once, as one matrix of weights: a subset a line, a row of the corpus a column.

Shape letters: B subsets, N rows of the corpus."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from grasp.errors import ShapeError, SubsetError
from grasp.predict.weights import PackedMasks, Weights

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
