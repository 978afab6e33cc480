"""Checks of the derivatives of a training run: smoothness, and agreement of orders.

In a smooth run, the norm of the adjoint and the derivatives of drawn rows per learning rate are nearly constant over
steps. Otherwise both grow towards the first steps, where the derivatives are noise. Two orders of the rows agree as far
as the derivatives exceed noise. Start with `smoothness`.

Shape letters: K steps, N rows, T targets.
"""

from dataclasses import dataclass

import numpy as np
from scipy.stats import spearmanr

from grasp.arrays import F64
from grasp.errors import ModelError
from grasp.training.metagradient import Metagradient

MAX_GROWTH = 4.0  # smooth runs stay below 2; the first third of runs from scratch has 8 and more
N_WINDOWS = 12  # windows of steps whose standard deviations of derivatives are compared
MIN_AGREEMENT = 0.2  # rank correlation of two orders below which a note says what to do
REMEDY = "lower learning rate x steps, enlarge the batch, or replay more orders"


@dataclass(frozen=True, slots=True)
class Smoothness:
    """Growth of derivatives from the end of a training run to its beginning.

    Attributes:
        growth_K: norm of the adjoint before each step over that at the last step, mean over targets.
        std_growth_K: standard deviation of the derivatives of drawn rows per learning rate in the window of steps that
            contains the step, over that in the last quarter.
        first_step: first step from which on both are within the limit; earlier steps are not used.
    """

    growth_K: F64
    std_growth_K: F64
    first_step: int

    @property
    def is_smooth(self) -> bool:
        """Return whether all replayed steps are used."""
        return self.first_step <= int(np.flatnonzero(np.isfinite(self.growth_K))[0])

    def __str__(self) -> str:
        growth, std_growth = np.nanmax(self.growth_K), np.nanmax(self.std_growth_K)
        line = f"adjoint grows {growth:.1f} times, spread of rows {std_growth:.1f} times"
        if self.is_smooth:
            return f"{line}: smooth"
        return f"{line}: steps before {self.first_step} are left out"


def smoothness(replay: Metagradient, limit: float = MAX_GROWTH, rate_K: F64 | None = None) -> Smoothness:
    """Measure the growth of derivatives towards the beginning, and find the first step that is used.

    Args:
        replay: derivatives of a training run.
        limit: maximum growth of the adjoint, and of the standard deviation of derivatives.
        rate_K: learning rate of each step, to which derivatives are proportional. Default: a constant one.
    """
    steps = len(replay.order_KB)
    rate_K = np.ones(steps) if rate_K is None else rate_K
    last_quarter = slice(steps - max(1, steps // 4), steps)
    growth_K = (replay.adjoint_norm_KT / replay.adjoint_norm_KT[-1]).mean(axis=1)
    std_KT = np.full((steps, replay.drawn_KBT.shape[2]), np.nan)
    for window in np.array_split(np.arange(steps), min(N_WINDOWS, steps)):
        # (X, T): the rows of all batches of the window; padding and steps that were not replayed are NaN
        value_XT = replay.drawn_KBT[window].reshape(-1, replay.drawn_KBT.shape[2])
        value_XT = value_XT[np.isfinite(value_XT).all(axis=1)]
        if len(value_XT):
            std_KT[window] = value_XT.std(axis=0) / (rate_K[window].mean() or np.inf)
    std_growth_K = (std_KT / np.nanmean(std_KT[last_quarter], axis=0)).mean(axis=1)
    rough = np.flatnonzero(~((growth_K <= limit) & (std_growth_K <= limit)))
    return Smoothness(growth_K, std_growth_K, int(rough[-1]) + 1 if rough.size else 0)


def agreement(first: Metagradient, second: Metagradient, n_rows: int) -> F64:
    """Return the rank correlation of the scores of two orders, (T,), over all rows or over those drawn in both.

    Args:
        first: replay of one order.
        second: replay of another order.
        n_rows: rows of the corpus.
    Raises:
        ModelError: fewer than 3 rows were drawn in both orders.
    """
    if first.probe_MNT.size and second.probe_MNT.size:
        scores = [replay.probed() for replay in (first, second)]
    else:
        drawn_rows = [replay.order_KB[np.isfinite(replay.drawn_KBT[..., 0])] for replay in (first, second)]
        common = np.intersect1d(drawn_rows[0], drawn_rows[1])
        if len(common) < 3:
            raise ModelError(f"agreement: {len(common)} rows were drawn in both orders, expected at least 3")
        scores = [replay.drawn(n_rows)[common] for replay in (first, second)]
    return rank_agreement(*scores)


def rank_agreement(first_NT: F64, second_NT: F64) -> F64:
    """Return the rank correlation of two scores over rows, (T,)."""
    return np.array([float(spearmanr(a, b).statistic) for a, b in zip(first_NT.T, second_NT.T, strict=True)])
