"""A block of subsets as a sparse matrix of weights. Shape letters: B subsets, N rows of the corpus."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from grasp.errors import ShapeError, SubsetError

Side = Literal["retained", "omitted"]

# Entries of one block: 12 bytes each, so a block stays under half a gigabyte however large its subsets are.
MAX_BLOCK_ENTRIES = 1 << 25


@dataclass(frozen=True, slots=True)
class SubsetBlock:
    """B subsets of a corpus of N rows, always the RETAINED side, with raw weights w_i (1 by default).

    Attributes:
        subset_ids: names of the B subsets, in the order of the rows of `weights_BN`.
        weights_BN: (B, N) float64, finite and >= 0, each row with a positive sum; no stored zeros.
        redrawn: draws of this block that came out empty (or, for groups, whole) and were drawn again.
    """

    subset_ids: tuple[str, ...]
    weights_BN: csr_array
    redrawn: int = 0

    def __post_init__(self) -> None:
        if self.weights_BN.shape[0] != len(self.subset_ids):
            raise ShapeError(f"block: {len(self.subset_ids)} subset_ids for weights of shape {self.weights_BN.shape}")

    @property
    def sizes_B(self) -> NDArray[np.int64]:  # noqa: N802 - a shape suffix
        """Rows with a weight above zero, per subset."""
        return np.diff(self.weights_BN.indptr).astype(np.int64)

    @property
    def n_rows(self) -> int:
        """N, the rows of the corpus."""
        return int(self.weights_BN.shape[1])


@dataclass(frozen=True, slots=True)
class WeightedRows:
    """One subset: its name, the rows it retains (ascending) and their weights (None: all 1)."""

    subset_id: str
    row_index: NDArray[np.int64]
    weights: NDArray[np.float64] | None = None
    redrawn: int = 0


def stack(subsets: Sequence[WeightedRows], n_rows: int) -> SubsetBlock:
    """One block out of single subsets; refuses weights that are not finite, negative, or all zero."""
    indptr = np.concatenate([[0], np.cumsum([len(item.row_index) for item in subsets])])
    indices = np.concatenate([item.row_index for item in subsets])
    data = np.concatenate([_checked_weights(item) for item in subsets])
    weights_BN = csr_array((data, indices, indptr), shape=(len(subsets), n_rows))
    weights_BN.eliminate_zeros()
    return SubsetBlock(tuple(item.subset_id for item in subsets), weights_BN, sum(item.redrawn for item in subsets))


def in_blocks(subsets: Iterable[WeightedRows], n_rows: int, block: int) -> Iterator[SubsetBlock]:
    """Group single subsets into blocks of at most `block` subsets and MAX_BLOCK_ENTRIES entries."""
    if block < 1:
        raise SubsetError(f"block: got {block}, expected at least 1 subset in a block")
    pending: list[WeightedRows] = []
    entries = 0
    for item in subsets:
        if pending and (len(pending) == block or entries + len(item.row_index) > MAX_BLOCK_ENTRIES):
            yield stack(pending, n_rows)
            pending, entries = [], 0
        pending.append(item)
        entries += len(item.row_index)
    if pending:
        yield stack(pending, n_rows)


def one_subset(subset_id: str, mask_N: NDArray[np.bool_], weights: NDArray[np.float64] | None = None) -> SubsetBlock:
    """A block of the one subset that `mask_N` retains; an empty mask is refused."""
    return stack([WeightedRows(subset_id, np.flatnonzero(mask_N), weights)], len(mask_N))


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
    bad = np.flatnonzero(~np.isfinite(weights) | (weights < 0))
    if bad.size:
        raise SubsetError(
            f"subset {item.subset_id!r}: row {int(item.row_index[bad[0]])} has weight "
            f"{float(weights[bad[0]])!r} ({bad.size} such); weights are finite and >= 0"
        )
    if weights.sum() <= 0:
        raise SubsetError(f"subset {item.subset_id!r}: its weights sum to 0; at least one must be positive")
    return weights
