"""Scores of rows from replays in several orders: checked for smoothness, standardized, and averaged.

A row has two scores for a target:

    drawn     the sum of its derivatives over the steps whose batch contained it, mean over the orders that drew it
    probed    the mean over probe steps of its derivative there, with each step standardized over rows

Only steps from which on a replay is smooth are used. If no more than the last third of a replay is smooth, it is
repeated with Gauss-Newton, and discarded if it is still not smooth. Start with `replay_rows`.

Shape letters: N rows, T targets.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from grasp.arrays import F64
from grasp.training.metagradient import Metagradient, MetagradientSettings, Target, metagradient
from grasp.training.replay_gate import LEAST_AGREEMENT, WHAT_TO_DO, Smoothness, agreement, smoothness
from grasp.training.trajectory import Trajectory

LATEST_START = 2 / 3  # a replay that is only smooth from a later part of the run on is repeated or discarded


def brought_to_one_scale(score_NT: F64) -> F64:
    """Standardize the scores of each target over the rows that have one; constant scores become 0."""
    spread_T = np.nanstd(score_NT, axis=0)
    centred_NT = score_NT - np.nanmean(score_NT, axis=0)
    scaled_NT: F64 = np.divide(centred_NT, spread_T, out=np.zeros_like(score_NT), where=spread_T > 0)
    return np.where(np.isnan(score_NT), np.nan, scaled_NT)


def drawn_scores(replays: Sequence[Metagradient], n_rows: int, windows: Sequence[tuple[int, int]]) -> F64:
    """Average the derivatives of drawn rows over the orders that drew them, (N, T); NaN for rows never drawn.

    Args:
        windows: first step and end of the used steps of each order.
    """
    total_NT, count_N1 = np.zeros((n_rows, replays[0].drawn_KBT.shape[2])), np.zeros((n_rows, 1))
    for replay, (first, last) in zip(replays, windows, strict=True):
        seen_N = np.zeros(n_rows, dtype=np.bool_)
        order_KB = replay.order_KB[first:last]
        seen_N[order_KB[order_KB >= 0]] = True
        part_NT = np.where(seen_N[:, None], replay.drawn(n_rows, first, last), np.nan)
        spread_T = np.nanstd(part_NT, axis=0)
        total_NT[seen_N] += part_NT[seen_N] / np.where(spread_T > 0, spread_T, 1.0)
        count_N1[seen_N] += 1
    mean_NT: F64 = np.divide(total_NT, count_N1, out=np.full_like(total_NT, np.nan), where=count_N1 > 0)
    return mean_NT


def probed_scores(replays: Sequence[Metagradient], steps: Sequence[Sequence[int]]) -> F64:
    """Average the derivatives of all rows over probe steps and orders, (N, T).

    Args:
        steps: used probe steps of each order.
    """
    parts = [replay.probed(chosen) for replay, chosen in zip(replays, steps, strict=True) if len(chosen)]
    mean_NT: F64 = np.mean(parts, axis=0)
    return mean_NT


@dataclass(frozen=True, slots=True)
class ReplayedRows:
    """Scores of rows for targets; positive if more weight of the row increases the utility of the target.

    Attributes:
        drawn_NT: drawn scores, NaN for rows never drawn; None: no order is smooth.
        probed_NT: probed scores; None: no probe step is used.
        smooth: smoothness of every replay, including discarded ones.
        agreements: rank correlation by target for each pair of used orders.
        notes: what was not used, and what to do about it.
    """

    drawn_NT: F64 | None
    probed_NT: F64 | None
    smooth: tuple[Smoothness, ...]
    agreements: tuple[F64, ...]
    notes: tuple[str, ...]

    def relevance(self) -> F64 | None:
        """Return the sum of both scores on one scale, (N, T); a row that was not drawn has the probed one alone.

        None: no replay is smooth, and the notes say what to do.
        """
        if self.drawn_NT is None:
            return None
        drawn_NT = np.nan_to_num(brought_to_one_scale(self.drawn_NT))
        return drawn_NT if self.probed_NT is None else drawn_NT + brought_to_one_scale(self.probed_NT)


def replay_rows(
    start: Callable[[int], Trajectory],
    targets: Sequence[Target],
    settings: MetagradientSettings,
    orders: int,
    progress: Callable[[int, int], None] | None = None,
) -> ReplayedRows:
    """Train and differentiate in several orders, and score rows by what is smooth.

    Args:
        start: gives the training in an order, by its number, before its first step.
        progress: called with the number of the order and the steps that are left of it.
    """
    smooth_replays: list[tuple[Metagradient, int]] = []
    tried, notes, n_rows = [], [], 0
    for w in range(orders):
        for curvature in dict.fromkeys((settings.curvature, "gauss-newton")):
            trajectory = start(w)
            n_rows, steps = trajectory.rows.n_rows, len(trajectory.order)
            trajectory.train()
            changed = settings.model_copy(update={"curvature": curvature})
            replay = metagradient(trajectory, targets, changed, None if progress is None else partial(progress, w))
            smooth = smoothness(replay)
            tried.append(smooth)
            notes.append(f"order {w}, {curvature}: {smooth}")
            if smooth.first_step <= LATEST_START * steps:
                smooth_replays.append((replay, smooth.first_step))
                break
    if not smooth_replays:
        notes.append(f"no replay is smooth, so its scores are not used; {WHAT_TO_DO}")
        return ReplayedRows(None, None, tuple(tried), (), tuple(notes))
    replays = [replay for replay, _ in smooth_replays]
    probes = [[int(step) for step in replay.probe_steps_M if step >= first] for replay, first in smooth_replays]
    agreements = [agreement(first, second, n_rows) for i, first in enumerate(replays) for second in replays[:i]]
    if agreements and (least := float(np.min(np.mean(agreements, axis=0)))) < LEAST_AGREEMENT:
        notes.append(f"two orders agree by {least:.2f} for the least target; {WHAT_TO_DO}")
    windows = [(first, len(replay.order_KB)) for replay, first in smooth_replays]
    return ReplayedRows(
        drawn_scores(replays, n_rows, windows),
        probed_scores(replays, probes) if any(probes) else None,
        tuple(tried),
        tuple(agreements),
        tuple(notes),
    )
