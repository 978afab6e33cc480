"""How well scores find related rows: scores fused, and recall among the best k against what chance would find.

Shape letters: N rows, Q queries, K rows at the top.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from grasp.errors import SettingsError
from grasp.seeds import stream

F64 = NDArray[np.float64]
Fusion = Literal["rrf", "z"]
FUSIONS: tuple[Fusion, ...] = get_args(Fusion)
RRF = 60.0  # of Cormack et al. 2009
LEVEL = 0.95


def fused(scores_N: Sequence[NDArray[np.floating[Any]]], rule: Fusion) -> F64:
    """Several scores of the same rows for one query as one score, (N,).

    rrf: sum over scores of 1 / (60 + rank), rank 1 the best and equal scores sharing their mean rank; z: sum of scores
    less their mean, by their standard deviation (one that does not vary counts for nothing).
    Source: Cormack, Clarke and Buettcher 2009 for rrf; the paper names no rule.
    """
    parts = [_reciprocal_rank(one) if rule == "rrf" else _standardised(one) for one in scores_N]
    return np.asarray(np.sum(parts, axis=0))


def _reciprocal_rank(score_N: NDArray[np.floating[Any]]) -> F64:
    return np.asarray(1.0 / (RRF + rankdata(-score_N, method="average")))


def _standardised(score_N: NDArray[np.floating[Any]]) -> F64:
    wide_N = np.asarray(score_N, dtype=np.float64)
    deviation = float(wide_N.std())
    centred_N = wide_N - wide_N.mean()
    # a constant's own rounding is no variation
    return centred_N / deviation if deviation > 1e-12 * np.abs(wide_N).max(initial=0.0) else np.zeros_like(centred_N)


@dataclass(frozen=True, slots=True)
class TopRows:
    """The best k rows; rows that tie for the last places share them."""

    row_index: NDArray[np.int64]  # (K',), K' >= k
    share: F64  # (K',) 1, or the chance of a place among those that tie; adds up to k

    @classmethod
    def of(cls, score_N: NDArray[np.floating[Any]], k: int) -> "TopRows":
        """Expected over all orders of equal scores: the order of the corpus decides nothing."""
        last = np.partition(score_N, len(score_N) - k)[len(score_N) - k]
        above, ties = np.flatnonzero(score_N > last), np.flatnonzero(score_N == last)
        share = np.concatenate([np.ones(len(above)), np.full(len(ties), (k - len(above)) / len(ties))])
        return cls(np.concatenate([above, ties]), share)

    def lift(self, related_N: NDArray[np.bool_]) -> float:
        """Recall among the best k by what it is by chance, k / N; 1: no better than chance. Source: none in the paper,
        whose "normalized Recall@1000" of random scores is near 1."""
        k = float(self.share.sum())
        hits = float(self.share[related_N[self.row_index]].sum())
        return hits / float(related_N.sum()) / (k / len(related_N))


@dataclass(frozen=True, slots=True)
class Span:
    """A mean over queries with its interval."""

    mean: float
    low: float
    high: float


def span(values_Q: F64, *, resamples: int, seed: int = 0) -> Span:
    """Mean and 95 % interval, by bootstrap over queries; the same resamples for every method.

    Raises:
        SettingsError: no queries.
    """
    if not len(values_Q):
        raise SettingsError("retrieve: got no queries to average over, expected at least one")
    generator = stream(seed, "retrieval", "bootstrap")
    means = [float(values_Q[generator.integers(len(values_Q), size=len(values_Q))].mean()) for _ in range(resamples)]
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]) if means else (np.nan, np.nan)
    return Span(float(values_Q.mean()), float(low), float(high))
