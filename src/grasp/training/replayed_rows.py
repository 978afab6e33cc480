"""Scores of rows from replays in several orders: checked for smoothness, standardized, and averaged.

A row has two scores for a target:

    drawn     the sum of its derivatives over the steps whose batch contained it, mean over the orders that drew it
    probed    the mean over probe steps of its derivative there, with each step standardized over rows

An *order* is one training run with its own order of the rows. Steps from which on a replay is smooth (`replay_checks`)
are used. If no more than the last third of a replay is smooth, it is discarded. Start with `replay_rows`.

In a training from scratch, derivatives at single probe steps are noise, and a row is drawn about once. What the
derivatives of drawn rows have in common is then predicted for all rows from their text: see `scores_from_text`.

Shape letters: N rows, n rows of a block, S rows with a score, K steps, T targets, F folds, V hashed features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from grasp.arrays import F64, I64, ratio
from grasp.corpus.row_store import RowStore
from grasp.corpus.token_regression import SLOTS, TokenFeatures, ridge
from grasp.files import atomic_path, discard
from grasp.progress import Progress
from grasp.seeds import stream
from grasp.training.metagradient import Metagradient, MetagradientSettings, Target, metagradient
from grasp.training.replay_checks import MIN_AGREEMENT, REMEDY, Smoothness, agreement, rank_agreement, smoothness
from grasp.training.trajectory import Trajectory

FOLDS = 5  # of documents, in regressions on text
BLOCK_ROWS = 4096
LATEST_START = 2 / 3  # a replay that is only smooth from a later part of the run on is discarded


def standardize_scores(score_NT: F64) -> F64:
    """Standardize the scores of each target over the rows that have one; constant scores become 0."""
    std_T = np.nanstd(score_NT, axis=0)
    centred_NT = score_NT - np.nanmean(score_NT, axis=0)
    return np.where(np.isnan(score_NT), np.nan, ratio(centred_NT, std_T))


def drawn_scores(replays: Sequence[Metagradient], n_rows: int, windows: Sequence[tuple[int, int]]) -> F64:
    """Average the derivatives of drawn rows over the orders that drew them, (N, T); NaN for rows never drawn.

    Each order is divided by its standard deviation over rows first.

    Args:
        replays: replay of each order.
        n_rows: rows of the corpus, N.
        windows: first step and end of the used steps of each order.
    """
    total_NT, count_N1 = np.zeros((n_rows, replays[0].drawn_KBT.shape[2])), np.zeros((n_rows, 1))
    for replay, (first, last) in zip(replays, windows, strict=True):
        is_drawn_N = np.zeros(n_rows, dtype=np.bool_)
        order_KB = replay.order_KB[first:last]
        is_drawn_N[order_KB[order_KB >= 0]] = True
        sum_NT = np.where(is_drawn_N[:, None], replay.drawn(n_rows, first, last), np.nan)
        std_T = np.nanstd(sum_NT, axis=0)
        total_NT[is_drawn_N] += sum_NT[is_drawn_N] / np.where(std_T > 0, std_T, 1.0)
        count_N1[is_drawn_N] += 1
    return ratio(total_NT, count_N1, undefined=np.nan)


def probed_scores(replays: Sequence[Metagradient], steps: Sequence[Sequence[int]]) -> F64:
    """Average the derivatives of all rows over probe steps and orders, (N, T).

    Args:
        replays: replay of each order.
        steps: used probe steps of each order.
    """
    scores = [replay.probed(used) for replay, used in zip(replays, steps, strict=True) if len(used)]
    mean_NT: F64 = np.mean(scores, axis=0)
    return mean_NT


def scores_from_text(score_NT: F64, rows: RowStore, document_N: I64, seed: int) -> F64:
    """Predict the scores of all rows from their tokens, (N, T), on one scale.

    A row is predicted by a ridge regression on hashed tf-idf, fitted on the rows of other documents that have a score.

    Args:
        score_NT: scores; NaN for rows without one.
        rows: the corpus.
        document_N: document of each row, from 0.
        seed: seed of the folds of documents.
    """
    folds = stream(seed, "replay", "folds").permutation(np.arange(int(document_N.max()) + 1) % FOLDS)
    fold_N, scored_S = folds[document_N], np.flatnonzero(np.isfinite(score_NT).all(axis=1))
    score_ST, texts = standardize_scores(score_NT[scored_S]), rows.rows(scored_S)
    features, matrix_SV = TokenFeatures.fit(texts.flat_ids, texts.offsets)
    table_FVT = np.zeros((FOLDS, SLOTS, score_NT.shape[1]), dtype=np.float32)
    constant_FT = np.zeros((FOLDS, score_NT.shape[1]))
    for fold in range(FOLDS):
        training_S = np.flatnonzero(fold_N[scored_S] != fold)
        if len(training_S):
            table_FVT[fold], constant_FT[fold] = ridge(matrix_SV[training_S], score_ST[training_S])
    predicted_NT = np.zeros(score_NT.shape)
    for start in range(0, len(score_NT), BLOCK_ROWS):
        block_n = np.arange(start, min(start + BLOCK_ROWS, len(score_NT)))
        texts, fold_n = rows.rows(block_n), fold_N[block_n]
        predicted_NT[block_n] = features.apply(texts.flat_ids, texts.offsets, table_FVT, fold_n) + constant_FT[fold_n]
    return standardize_scores(predicted_NT)


@dataclass(frozen=True, slots=True)
class ReplayedRows:
    """Scores of rows for targets; positive if more weight of the row increases the utility of the target.

    Attributes:
        drawn_NT: drawn scores, NaN for rows never drawn; None: no order is smooth.
        all_NT: probed scores, or scores of all rows predicted from drawn scores; None: neither.
        smooth: smoothness of every replay, including discarded ones.
        agreements: rank correlation by target for each pair of used orders.
        notes: what was not used, and what to do about it.
    """

    drawn_NT: F64 | None
    all_NT: F64 | None
    smooth: tuple[Smoothness, ...]
    agreements: tuple[F64, ...]
    notes: tuple[str, ...]

    def relevance(self) -> F64 | None:
        """Return standardized scores of all rows, (N, T), or else the drawn scores, with 0 for rows never drawn.

        Where scores of all rows exist, drawn scores add nothing (experiments/replay).

        None: no replay is smooth, and the notes say what to do.
        """
        if self.drawn_NT is None:
            return None
        if self.all_NT is None:
            return np.nan_to_num(standardize_scores(self.drawn_NT))
        return standardize_scores(self.all_NT)


def replay_rows(
    start: Callable[[int], Trajectory],
    targets: Sequence[Target],
    settings: MetagradientSettings,
    orders: int,
    directory: Path,
    *,
    rate_K: F64 | None = None,
    predict_all_rows: Callable[[F64], F64] | None = None,
    progress: Progress | None = None,
) -> ReplayedRows:
    """Train and differentiate in several orders, and score rows by what is smooth.

    Args:
        start: function that returns the training run of an order, given by its number, before its first step. If
            trajectories have directories, which are removed after the replay, the same call resumes a killed one.
        targets: targets whose utilities are differentiated.
        settings: settings of the replays.
        orders: number of orders.
        directory: stores finished replays; it must belong to this training, these targets and settings.
        rate_K: learning rate of each step. Default: a constant one.
        predict_all_rows: function that predicts the scores of all rows from drawn scores, instead of probe steps.
        progress: optional callback that receives the rows processed.
    """
    smooth_replays: list[tuple[Metagradient, int]] = []
    all_smoothness, notes, n_rows = [], [], 0
    for k in range(orders):
        path, order_text = directory / f"order-{k}.safetensors", f"{k + 1} of {orders}"
        if not path.exists():
            _replay_order(start(k), targets, settings, order_text, progress or Progress(), path)
        replay = Metagradient.load(path)
        n_rows, smooth = replay.probe_MNT.shape[1], smoothness(replay, rate_K=rate_K)
        all_smoothness.append(smooth)
        notes.append(f"order {order_text}: {smooth}")
        if smooth.is_smooth or smooth.first_step <= LATEST_START * len(replay.order_KB):
            smooth_replays.append((replay, smooth.first_step))
    if not smooth_replays:
        notes.append(f"no replay is smooth, so its scores are not used; {REMEDY}")
        return ReplayedRows(None, None, tuple(all_smoothness), (), tuple(notes))
    if not all(smooth.is_smooth for smooth in all_smoothness):
        notes.append(f"to use all steps, {REMEDY}")
    replays = [replay for replay, _ in smooth_replays]
    windows = [(first, len(replay.order_KB)) for replay, first in smooth_replays]
    drawn_NT, all_NT = drawn_scores(replays, n_rows, windows), None
    if predict_all_rows is not None:
        all_NT = predict_all_rows(drawn_NT)
        single = [drawn_scores([replay], n_rows, [window]) for replay, window in zip(replays, windows, strict=True)]
        predicted = [predict_all_rows(score_NT) for score_NT in single] if len(single) > 1 else []
        agreements = [rank_agreement(first, second) for i, first in enumerate(predicted) for second in predicted[:i]]
    else:
        probes = [[int(step) for step in replay.probe_steps_M if step >= first] for replay, first in smooth_replays]
        all_NT = probed_scores(replays, probes) if any(probes) else None
        agreements = [agreement(first, second, n_rows) for i, first in enumerate(replays) for second in replays[:i]]
    if agreements and (least := float(np.min(np.mean(agreements, axis=0)))) < MIN_AGREEMENT:
        notes.append(f"two orders agree by {least:.2f} for the least target; {REMEDY}")
    return ReplayedRows(drawn_NT, all_NT, tuple(all_smoothness), tuple(agreements), tuple(notes))


def _replay_order(
    trajectory: Trajectory,
    targets: Sequence[Target],
    settings: MetagradientSettings,
    order_text: str,
    progress: Progress,
    path: Path,
) -> None:
    """Train and differentiate in one order, store the result at `path`, and remove the states."""
    n_rows = sum(len(index_B) for index_B in trajectory.order)
    progress.stage(f"training {order_text}", rows=n_rows, tokens=None)
    trajectory.train(lambda done: progress.advance(len(trajectory.order[done - 1]), 0))
    progress.stage(f"replay {order_text}", rows=n_rows, tokens=None)
    replay = metagradient(trajectory, targets, settings, lambda left: progress.advance(len(trajectory.order[left]), 0))
    with atomic_path(path) as temporary:
        replay.save(temporary)
    if trajectory.directory is not None:
        discard(trajectory.directory)
