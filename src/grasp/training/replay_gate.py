"""Whether derivatives of a training are to be trusted: values, and the line that says what to do.

Where a training is smooth, the adjoint of the weights keeps its size from step to step, and the derivatives of drawn
rows keep theirs. Where it is not, both grow many times towards the first steps, and what they say there is noise. Two
orders of the rows agree as far as derivatives are more than noise. And a retraining with other weights of *groups* of
rows moves the utilities as predicted; weights of single rows move them too little to be seen.

Shape letters: K steps, N rows, T targets, R retrainings.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import spearmanr

from grasp.arrays import F64, I64
from grasp.errors import ModelError
from grasp.seeds import stream
from grasp.training.metagradient import Metagradient, Target, utilities
from grasp.training.trajectory import Trajectory

LARGEST_GROWTH = 4.0  # smooth trainings stay below 2; of those from scratch, the first third has 8 and more
PARTS = 12  # of a training, whose derivatives have a spread each
LEAST_AGREEMENT = 0.2
WHAT_TO_DO = "lower learning rate x steps, enlarge the batch, or replay more orders"


@dataclass(frozen=True, slots=True)
class Smoothness:
    """How far derivatives grow from the end of a training to its beginning.

    Attributes:
        growth_K: norm of the adjoint before each step over that at the last step, mean over targets.
        spread_K: spread of the derivatives of drawn rows, in the part of the training that a step belongs to, over that
            in its last quarter.
        first_step: of the steps that count: from here on neither has grown beyond the limit.
    """

    growth_K: F64
    spread_K: F64
    first_step: int

    @property
    def passed(self) -> bool:
        """Return whether every step that was replayed counts."""
        return self.first_step <= int(np.flatnonzero(np.isfinite(self.growth_K))[0])

    def __str__(self) -> str:
        growth, spread = np.nanmax(self.growth_K), np.nanmax(self.spread_K)
        line = f"adjoint grows {growth:.1f} times, spread of rows {spread:.1f} times"
        if self.passed:
            return f"{line}: smooth"
        return f"{line}: steps before {self.first_step} are left out"


def smoothness(replay: Metagradient, limit: float = LARGEST_GROWTH) -> Smoothness:
    """Measure how far derivatives grow towards the beginning, and from which step on they count."""
    steps = len(replay.order_KB)
    last = slice(steps - max(1, steps // 4), steps)
    growth_K = (replay.adjoint_norm_KT / replay.adjoint_norm_KT[-1]).mean(axis=1)
    spread_KT = np.full((steps, replay.drawn_KBT.shape[2]), np.nan)
    for part in np.array_split(np.arange(steps), min(PARTS, steps)):
        value_XT = replay.drawn_KBT[part].reshape(-1, replay.drawn_KBT.shape[2])
        value_XT = value_XT[np.isfinite(value_XT).all(axis=1)]
        if len(value_XT):
            spread_KT[part] = value_XT.std(axis=0)
    spread_K = (spread_KT / np.nanmean(spread_KT[last], axis=0)).mean(axis=1)
    rough = np.flatnonzero(~((growth_K <= limit) & (spread_K <= limit)))
    return Smoothness(growth_K, spread_K, int(rough[-1]) + 1 if rough.size else 0)


def agreement(first: Metagradient, second: Metagradient, n_rows: int) -> F64:
    """Return the rank correlation of rows' scores in two orders, (T,): of all rows, else of those drawn in both.

    Raises:
        ModelError: the orders have no row in common.
    """
    if first.probe_MNT.size and second.probe_MNT.size:
        scores = [replay.probed() for replay in (first, second)]
    else:
        common = np.intersect1d(first.order_KB, second.order_KB)
        common = common[common >= 0]
        if len(common) < 3:
            raise ModelError(f"agreement: {len(common)} rows were drawn in both orders, expected at least 3")
        scores = [replay.drawn(n_rows)[common] for replay in (first, second)]
    return np.array([float(spearmanr(a, b).statistic) for a, b in zip(*(score.T for score in scores), strict=True)])


@dataclass(frozen=True, slots=True)
class GroupCheck:
    """Changes of utilities by other weights of groups of rows: by retraining, and by derivatives, (R, T), nats."""

    measured_RT: F64
    predicted_RT: F64

    @property
    def slope(self) -> float:
        """Return measured against predicted change by least squares through 0: 1 where derivatives are exact."""
        return float((self.measured_RT * self.predicted_RT).sum() / (self.predicted_RT**2).sum())

    @property
    def correlation(self) -> float:
        """Return the cosine of measured and predicted changes over all retrainings and targets."""
        size = np.linalg.norm(self.measured_RT) * np.linalg.norm(self.predicted_RT)
        return float((self.measured_RT * self.predicted_RT).sum() / size)

    def __str__(self) -> str:
        return (
            f"{len(self.measured_RT)} retrainings with weights of groups: measured {self.slope:.2f} of the predicted "
            f"change, correlation {self.correlation:.2f}"
        )


def check_by_groups(
    trajectory: Trajectory,
    targets: Sequence[Target],
    replay: Metagradient,
    group_N: I64,
    *,
    shift: float = 0.1,
    retrainings: int = 1,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> GroupCheck:
    """Retrain with the weight of each group moved up or down at random, and compare with the derivatives.

    Args:
        group_N: number of each row's group, from 0.
        shift: how far weights are moved.
        progress: called with the number of retrainings done, after each.
    Raises:
        ModelError: steps were left out of the replay, whose part of the change is not predicted.
    """
    if not np.isfinite(replay.adjoint_norm_KT).all():
        raise ModelError("check_by_groups: early steps were left out of the replay, expected all; replay from step 0")
    derivative_NT = replay.drawn(trajectory.rows.n_rows)
    measured, predicted = [], []
    for r in range(retrainings):
        sign_G = stream(seed, "replay", "groups", r).choice([-1.0, 1.0], size=int(group_N.max()) + 1)
        move_N = shift * sign_G[group_N]
        trajectory.retrain(trajectory.weight_N + move_N)
        measured.append(utilities(trajectory.training, targets) - replay.utility_T)
        predicted.append(move_N @ derivative_NT)
        if progress is not None:
            progress(r + 1)
    return GroupCheck(np.array(measured), np.array(predicted))
