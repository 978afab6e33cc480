"""Compare the labels of rows with those of their nearest neighbours. Start with `disagreement`.

The search is exact for small corpora. For large ones the rows are divided into cells around random rows, as in an
inverted-file index, and the neighbours of a row are searched for in the nearest cells only.

Shape letters: N rows, D sketch width, Q rows of a block, M candidate neighbours, K neighbours, W blocks of columns, C
cells (or rows that are checked).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from grasp.arrays import F32, F64, I64, Bool
from grasp.progress import Progress
from grasp.seeds import stream

# candidate neighbours of a row: all rows of a smaller corpus, else those of the nearest cells
MAX_CANDIDATES: Final = 20_000
SEARCHED_CELLS: Final = 80  # number of cells of the candidates
MAX_CELLS: Final = 4_096  # more cells would cost more than comparing their rows
SAMPLED_ROWS_PER_CELL: Final = 10  # rows per cell from which the centres are computed
CHECKED_ROWS: Final = 200  # rows for which the recall is measured
QUERIES: Final = 512  # rows whose neighbours are searched for at once
BLOCK: Final = 16  # columns per block of the search for maxima


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Disagreement of labels between rows and their neighbours.

    Attributes:
        share_N: share of the nearest neighbours with another label, weighted by similarity.
    """

    share_N: F64
    is_singleton_N: Bool  # rows with a unique label, which get the median share
    recall: float  # share of the exact nearest neighbours that were found


def disagreement(
    feature_ND: NDArray[np.floating], label_N: I64, k: int, progress: Progress | None = None
) -> Disagreement:
    """Compute the share of a row's k nearest rows by cosine with another label, weighted by similarity.

    Neighbours are exact up to MAX_CANDIDATES rows. Beyond, rows are assigned to cells around random rows, and those of
    a cell are compared with MAX_CANDIDATES rows of the nearest cells: O(N MAX_CANDIDATES D). Memory: the features as
    float32 twice, and a block of cosines.

    Args:
        feature_ND: features of the rows.
        label_N: label of each row.
        k: number of neighbours.
        progress: receives the stage and numbers of rows.
    """
    progress = progress or Progress()
    unit_ND = _normalise_rows(np.array(feature_ND, np.float32))
    n_rows, k = len(unit_ND), min(k, len(unit_ND) - 1)
    share_N, hits, checked_N = np.zeros(n_rows), 0.0, np.zeros(n_rows, dtype=np.bool_)
    checked_N[:: max(1, n_rows // CHECKED_ROWS)] = n_rows > MAX_CANDIDATES
    progress.stage("neighbours", rows=n_rows, tokens=None)
    cosines = np.empty((QUERIES, MAX_CANDIDATES), dtype=np.float32)
    for row_N, other_M in _candidate_cells(unit_ND) if k else ():
        other_MD = unit_ND[other_M]
        for start in range(0, len(row_N), QUERIES):
            row_Q = row_N[start : start + QUERIES]
            cosine_QM = np.matmul(unit_ND[row_Q], other_MD.T, out=cosines[: len(row_Q), : len(other_M)])
            cosine_QM[other_M == row_Q[:, None]] = -np.inf
            nearest_QK = _largest_columns(cosine_QM, k)
            cosine_QK = np.take_along_axis(cosine_QM, nearest_QK, axis=1)
            weight_QK = np.maximum(cosine_QK.astype(np.float64), 1e-6)  # rows without a similar one count alike
            differs_QK = label_N[other_M[nearest_QK]] != label_N[row_Q, None]
            share_N[row_Q] = (weight_QK * differs_QK).sum(axis=1) / weight_QK.sum(axis=1)
            if (checked_Q := checked_N[row_Q]).any():  # recall by similarity, since duplicates are interchangeable
                row_C = row_Q[checked_Q]
                exact_CN = unit_ND[row_C] @ unit_ND.T
                exact_CN[np.arange(len(row_C)), row_C] = -np.inf
                kth_largest_C = np.partition(exact_CN, -k, axis=1)[:, -k]
                hits += float((cosine_QK[checked_Q] >= kth_largest_C[:, None] - 1e-6).mean(axis=1).sum())
            progress.advance(len(row_Q), 0)
    is_singleton_N = np.bincount(label_N)[label_N] == 1
    if is_singleton_N.any() and not is_singleton_N.all():
        share_N[is_singleton_N] = np.median(share_N[~is_singleton_N])
    return Disagreement(share_N, is_singleton_N, hits / checked_N.sum() if checked_N.any() else 1.0)


def _candidate_cells(unit_ND: F32) -> Iterator[tuple[I64, I64]]:
    """Yield the rows of each cell, and their candidate neighbours from the nearest cells.

    The rows of a cell are in random order, so that truncation of a large cell, e.g. of duplicates, keeps a random part.
    """
    n_rows = len(unit_ND)
    if n_rows <= MAX_CANDIDATES:
        yield np.arange(n_rows), np.arange(n_rows)
        return
    order_N = stream(0, "neighbours").permutation(n_rows)
    centre_CD = unit_ND[order_N[: min(n_rows * SEARCHED_CELLS // MAX_CANDIDATES, MAX_CELLS)]]
    sample_ND = unit_ND[order_N[: SAMPLED_ROWS_PER_CELL * len(centre_CD)]]
    nearest_N = _nearest_centre(sample_ND, centre_CD)
    np.add.at(centre_CD, nearest_N, sample_ND)
    cell_N = _nearest_centre(unit_ND, _normalise_rows(centre_CD))
    order_N = order_N[np.argsort(cell_N[order_N], kind="stable")]
    end_C = np.bincount(cell_N, minlength=len(centre_CD)).cumsum()
    members = np.split(order_N, end_C[:-1])
    for cell in np.flatnonzero(np.diff(end_C, prepend=0)):  # only one of several equal centres has rows
        nearest_C = np.argsort(-(centre_CD @ centre_CD[cell]), kind="stable")
        n_cells = np.searchsorted(np.array([len(members[c]) for c in nearest_C]).cumsum(), MAX_CANDIDATES) + 1
        yield members[cell], np.concatenate([members[c] for c in nearest_C[:n_cells]])[:MAX_CANDIDATES]


def _normalise_rows(vector_ND: F32) -> F32:
    """Normalise vectors in place; zero vectors are unchanged."""
    size_N = np.linalg.norm(vector_ND, axis=1)
    vector_ND /= np.where(size_N > 0, size_N, 1)[:, None]
    return vector_ND


def _nearest_centre(unit_ND: F32, centre_CD: F32) -> I64:
    """Return the centre with the largest cosine to each row, (N,)."""
    blocks = range(0, len(unit_ND), QUERIES)
    return np.concatenate([np.argmax(unit_ND[start : start + QUERIES] @ centre_CD.T, axis=1) for start in blocks])


def _largest_columns(value_QM: F32, k: int) -> I64:
    """Return the columns of the k largest values of each row, (Q, k).

    Columns are divided into strided blocks of `BLOCK`. The k largest values are in the k blocks with the largest
    maxima: a value outside of them is exceeded by k maxima. Only these blocks are searched, again in this way.
    """
    width = value_QM.shape[1] // BLOCK
    if width < 4 * k:
        return np.argpartition(value_QM, value_QM.shape[1] - k, axis=1)[:, -k:]
    largest_QW = value_QM[:, :width].copy()
    for start in range(width, BLOCK * width, width):
        np.maximum(largest_QW, value_QM[:, start : start + width], out=largest_QW)
    block_QK = np.argpartition(largest_QW, width - k, axis=1)[:, -k:]
    column_QM = (block_QK[:, :, None] + width * np.arange(BLOCK)).reshape(len(value_QM), -1)
    remainder = np.arange(BLOCK * width, value_QM.shape[1])
    column_QM = np.concatenate([column_QM, np.tile(remainder, (len(value_QM), 1))], axis=1)
    return np.take_along_axis(column_QM, _largest_columns(np.take_along_axis(value_QM, column_QM, axis=1), k), axis=1)
