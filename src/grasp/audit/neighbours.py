"""Do the rows most like a row have its label? Shape letters: N rows, D sketch width, Q rows a block, K neighbours."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import voyager
from numpy.typing import NDArray

from grasp.extract.progress import Progress, Silent

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Bool = NDArray[np.bool_]
Near = tuple[int, F32, NDArray[np.int64]]  # first row, cosines (Q, K), rows (Q, K)

EXACT_ROWS = 20_000  # up to here all pairs are compared, in seconds; beyond, an index is searched
CHECKED_ROWS = 200  # whose neighbours by the index are held against the exact ones
QUERIES = 1024
LINKS, BUILD_WIDTH, SEARCH_WIDTH = 16, 80, 80  # of the index


@dataclass(frozen=True, slots=True)
class Disagreement:
    """How far the labels round a row are others than its own."""

    share_N: F64
    alone_N: Bool  # rows that are alone with their label: these get the median share, an opinion neither way
    found: float  # share of the nearest neighbours that were found


def disagreement(
    feature_ND: NDArray[np.floating], label_N: NDArray[np.int64], k: int, progress: Progress | None = None
) -> Disagreement:
    """Share of a row's k nearest other rows, by cosine, that have another label, each counted by its similarity.

    Up to EXACT_ROWS rows neighbours are exact, at O(N^2 D); beyond, they are those of an HNSW index (Malkov and
    Yashunin 2018), at about O(N log N). Memory: the features as float32, and about twice that for the index.
    """
    progress = progress or Silent()
    unit_ND = np.array(feature_ND, np.float32)
    size_N = np.linalg.norm(unit_ND, axis=1)
    unit_ND /= np.where(size_N > 0, size_N, 1)[:, None]
    n_rows, k = len(unit_ND), min(k, len(unit_ND) - 1)
    share_N, hits, checked = np.zeros(n_rows), 0.0, set(range(0, n_rows, max(1, n_rows // CHECKED_ROWS)))
    exact = n_rows <= EXACT_ROWS
    for start, cosine_QK, near_QK in (_all_pairs if exact else _by_index)(unit_ND, k, progress):
        weight_QK = np.maximum(cosine_QK.astype(np.float64), 1e-6)
        other_QK = label_N[near_QK] != label_N[start : start + len(near_QK), None]
        share_N[start : start + len(near_QK)] = (weight_QK * other_QK).sum(axis=1) / weight_QK.sum(axis=1)
        if not exact:
            here = np.array([row for row in range(start, start + len(near_QK)) if row in checked])
            hits += _hits(unit_ND, here, cosine_QK[here - start]) if len(here) else 0.0
        progress.advance(len(near_QK), 0)
    alone_N = np.bincount(label_N)[label_N] == 1
    if alone_N.any() and not alone_N.all():
        share_N[alone_N] = np.median(share_N[~alone_N])
    return Disagreement(share_N, alone_N, 1.0 if exact else hits / len(checked))


def _hits(unit_ND: F32, row_Q: NDArray[np.int64], cosine_QK: F32) -> float:
    """Sum over rows of the share of neighbours that are as near as the exact k nearest; copies of one are alike."""
    exact_QN = unit_ND[row_Q] @ unit_ND.T
    exact_QN[np.arange(len(row_Q)), row_Q] = -np.inf
    k = cosine_QK.shape[1]
    least_Q = np.partition(exact_QN, -k, axis=1)[:, -k]
    return float((cosine_QK >= least_Q[:, None] - 1e-6).mean(axis=1).sum())


def _all_pairs(unit_ND: F32, k: int, progress: Progress) -> Iterator[Near]:
    progress.stage("neighbours", rows=len(unit_ND), tokens=None)
    for start in range(0, len(unit_ND), QUERIES) if k else ():
        cosine_QN = unit_ND[start : start + QUERIES] @ unit_ND.T
        own_Q = np.arange(len(cosine_QN))
        cosine_QN[own_Q, start + own_Q] = -np.inf
        near_QK = np.argpartition(-cosine_QN, k - 1, axis=1)[:, :k]
        yield start, np.take_along_axis(cosine_QN, near_QK, axis=1), near_QK


def _by_index(unit_ND: F32, k: int, progress: Progress) -> Iterator[Near]:
    """One thread builds the index, so that the same rows always give the same neighbours."""
    n_rows, width = unit_ND.shape
    index = voyager.Index(
        voyager.Space.Euclidean,  # of unit vectors: the order of cosines
        num_dimensions=width,
        M=LINKS,
        ef_construction=BUILD_WIDTH,
        random_seed=1,
        max_elements=n_rows,
    )
    progress.stage("neighbour index", rows=n_rows, tokens=None)
    for start in range(0, n_rows, QUERIES):
        index.add_items(unit_ND[start : start + QUERIES], num_threads=1)
        progress.advance(min(QUERIES, n_rows - start), 0)
    progress.stage("neighbours", rows=n_rows, tokens=None)
    for start in range(0, n_rows, QUERIES):
        query_QD = unit_ND[start : start + QUERIES]
        found_QK = index.query(query_QD, k=k + 1, query_ef=max(k + 1, SEARCH_WIDTH))[0].astype(np.int64)
        cosine_QK = np.einsum("qd,qkd->qk", query_QD, unit_ND[found_QK])
        cosine_QK[found_QK == start + np.arange(len(query_QD))[:, None]] = -np.inf
        best_QK = np.argsort(-cosine_QK, axis=1, kind="stable")[:, :k]
        yield start, np.take_along_axis(cosine_QK, best_QK, axis=1), np.take_along_axis(found_QK, best_QK, axis=1)
