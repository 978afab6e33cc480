"""The order in which a training reads rows, and batches of their tokens.

`relative_weights` and `batch_order` determine the rows of each step; `token_batches` reads and pads them. The order is
one permutation of the whole corpus per seed and epoch, so that subsets see their common rows in the same order.

Shape letters: B rows of a batch, L tokens, N rows of the corpus.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from grasp.arrays import F64, I64, Bool
from grasp.corpus.row_store import RowStore
from grasp.errors import ModelError
from grasp.seeds import stream

WINDOW_ROWS = 16_384  # rows read at once, so that a shard on disk is read a few times instead of once per batch


def relative_weights(n_rows: int, batch_rows: int, retained: Bool | F64 | None) -> F64:
    """Return the frequency of each row relative to the most frequent row, (N,), from 0 (dropped) to 1.

    Args:
        n_rows: rows of the corpus, N.
        batch_rows: rows of a batch.
        retained: mask of the retained rows, or one weight per row; a row of weight 2 is seen twice as often as one of
            weight 1.
    Raises:
        ModelError: there are fewer rows than in a batch.
    """
    weight_N = np.ones(n_rows) if retained is None else np.asarray(retained, dtype=np.float64)
    assert weight_N.shape == (n_rows,)
    assert (np.isfinite(weight_N) & (weight_N >= 0)).all()
    if (n_retained := np.count_nonzero(weight_N)) < batch_rows:
        raise ModelError(
            f"retained: {n_retained} of {n_rows} rows, expected at least the {batch_rows} of one batch; retain"
            " more rows or lower the recipe's batch_rows"
        )
    frequency_N: F64 = weight_N / weight_N.max()
    return frequency_N


def row_order(frequency_N: Bool | F64, *, seed: int, start: int = 0) -> Iterator[I64]:
    """Yield the rows in training order from position `start`, endlessly, in chunks of at most one epoch.

    Every epoch is a permutation of the whole corpus, which is the same for all subsets of a seed; dropped rows are
    skipped. Therefore two subsets see their common rows in the same order. A row with frequency a < 1 is skipped in
    some epochs: it is seen in epoch e if an integer lies in (e a + u, (e + 1) a + u], with a random phase u per row.

    Args:
        frequency_N: result of `relative_weights`.
        seed: seed of the permutations and phases.
        start: number of rows to skip, for a resumed run.
    """
    phase_N = stream(seed, "order", "phase").random(len(frequency_N))
    epoch = 0
    while True:
        seen_N = np.floor((epoch + 1) * frequency_N + phase_N) > np.floor(epoch * frequency_N + phase_N)
        if (n_seen := int(np.count_nonzero(seen_N))) > start:
            order = stream(seed, "order", epoch).permutation(len(frequency_N))
            yield order[seen_N[order]][start:]
        epoch, start = epoch + 1, max(start - n_seen, 0)


def batch_order(
    frequency_N: Bool | F64, *, seed: int, batch_rows: int, first_step: int, last_step: int
) -> Iterator[I64]:
    """Yield the rows of each step in [`first_step`, `last_step`), (B,) each; a batch may span two epochs."""
    chunks = row_order(frequency_N, seed=seed, start=first_step * batch_rows)
    pending = np.zeros(0, dtype=np.int64)
    for _ in range(first_step, last_step):
        while len(pending) < batch_rows:
            pending = np.concatenate([pending, next(chunks)])
        yield pending[:batch_rows]
        pending = pending[batch_rows:]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The rows of one step."""

    row_index_B: I64
    ids_BL: I64  # token ids, padded on the right with 0
    weight_BL: F64  # of the loss of the token that follows each position: 1 / n_labels, or 0, times that of its row
    n_labels: int  # at least 1


def token_batches(
    rows: RowStore, order: Iterable[I64], *, context: int, vocab_size: int, weight_N: F64 | None = None
) -> Iterator[TokenBatch]:
    """Yield the batches of some steps. Many steps are read at once.

    Args:
        rows: the corpus.
        order: rows of each step.
        context: maximum tokens of a row.
        vocab_size: size of the vocabulary.
        weight_N: factor of the loss of each row; it does not change the number of labels in a batch.
    """
    window: list[I64] = []
    for index_B in order:
        if window and sum(map(len, window)) + len(index_B) > WINDOW_ROWS:
            yield from _read_window(rows, window, context, vocab_size, weight_N)
            window = []
        window.append(index_B)
    if window:
        yield from _read_window(rows, window, context, vocab_size, weight_N)


def _read_window(
    rows: RowStore, window: Sequence[I64], context: int, vocab_size: int, weight_N: F64 | None
) -> Iterator[TokenBatch]:
    """Yield the batches of some steps, whose rows are read at once."""
    unique = np.unique(np.concatenate(window))
    shard = rows.rows(unique)
    starts, lengths = shard.offsets[:-1], np.diff(shard.offsets)
    assert lengths.max() <= context, "rows are written for the model that is trained"
    assert (shard.flat_ids >= 0).all()
    assert (shard.flat_ids < vocab_size).all()
    flat_ids = np.append(shard.flat_ids, 0).astype(np.int64)  # index -1 is padding
    is_label = np.ones(len(flat_ids), np.bool_)
    if shard.loss_mask is not None:
        is_label[:-1] = shard.loss_mask
    is_label[[*starts, -1]] = False  # the first token of a row is not predicted, and padding has no labels
    for index_B in window:
        position_B = np.searchsorted(unique, index_B)
        length_B1 = lengths[position_B, None]
        offset_L = np.arange(length_B1.max())
        flat_index_BL = np.where(offset_L < length_B1, starts[position_B, None] + offset_L, -1)
        weight_BL = np.zeros(flat_index_BL.shape)
        weight_BL[:, :-1] = is_label[flat_index_BL[:, 1:]]  # position t predicts token t + 1
        n_labels = max(int(np.count_nonzero(weight_BL)), 1)
        weight_BL /= n_labels
        if weight_N is not None:
            weight_BL *= weight_N[index_B, None]
        yield TokenBatch(index_B, flat_ids[flat_index_BL], weight_BL, n_labels)
