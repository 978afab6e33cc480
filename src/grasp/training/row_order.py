"""The order in which a training reads rows, and batches of their tokens.

`relative_weights` and `batch_order` determine the rows of each step; `token_batches` reads and pads them. The order is
one permutation of the whole corpus per seed and epoch, so that subsets see their common rows in the same order.

Shape letters: K models, S steps of a window, B rows of a batch, L tokens, N rows of the corpus.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from grasp.arrays import F32, F64, I64, Bool
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
    """The rows of one step for K models."""

    row_index_KB: I64
    ids_KBL: I64  # token ids, padded on the right with 0
    loss_mask_KBL: Bool  # tokens that are labels, i.e. have a loss


def token_batches(
    rows: RowStore, orders: Sequence[Iterator[I64]], *, steps: int, context: int, vocab_size: int
) -> Iterator[TokenBatch]:
    """Yield the batches of `steps` steps; model k reads the rows of ``orders[k]``. Many steps are read at once.

    Args:
        rows: the corpus.
        orders: rows of each step, one iterator per model.
        steps: number of steps.
        context: maximum tokens of a row.
        vocab_size: size of the vocabulary.
    Raises:
        ModelError: a row is longer than `context`, or has a token outside the vocabulary.
    """
    window: list[I64] = []
    for step in range(steps):
        window.append(np.stack([next(order) for order in orders]))
        if (len(window) + 1) * window[0].size > WINDOW_ROWS or step == steps - 1:
            yield from _read_window(rows, np.stack(window), context, vocab_size)
            window = []


def _read_window(rows: RowStore, index_SKB: I64, context: int, vocab_size: int) -> Iterator[TokenBatch]:
    """Yield the batches of a window of S steps, whose rows are read at once."""
    unique, position = np.unique(index_SKB, return_inverse=True)
    shard = rows.rows(unique)
    starts, lengths = shard.offsets[:-1], np.diff(shard.offsets)
    if (too_long := np.flatnonzero(lengths > context)).size:
        raise ModelError(
            f"row {unique[too_long[0]]} has {lengths[too_long[0]]} tokens, the recipe reads at most {context}: set"
            f" corpus.max_length to {context}, or increase the recipe's context"
        )
    if (outside := np.flatnonzero((shard.flat_ids < 0) | (shard.flat_ids >= vocab_size))).size:
        row = np.searchsorted(shard.offsets, outside[0], side="right") - 1
        raise ModelError(
            f"row {unique[row]} has token id {shard.flat_ids[outside[0]]}, the recipe's vocabulary ends at"
            f" {vocab_size - 1}: use the tokenizer that the recipe's vocab_size belongs to"
        )
    flat_ids = np.append(shard.flat_ids, 0)  # index -1 is padding
    flat_loss_mask = np.ones(len(flat_ids), np.bool_)
    if shard.loss_mask is not None:
        flat_loss_mask[:-1] = shard.loss_mask
    flat_loss_mask[[*starts, -1]] = False  # the first token of a row is not predicted, and padding has no labels
    for index_KB, position_KB in zip(index_SKB, position.reshape(index_SKB.shape), strict=True):
        lengths_KB = lengths[position_KB]
        offset_L = np.arange(lengths_KB.max())
        flat_index_KBL = np.where(offset_L < lengths_KB[..., None], starts[position_KB][..., None] + offset_L, -1)
        yield TokenBatch(index_KB, flat_ids[flat_index_KBL].astype(np.int64), flat_loss_mask[flat_index_KBL])


def label_weights(batch: TokenBatch) -> F32:
    """Return the weight of the label of each position in the loss, (K, B, L); sums to 1 per model, 0 on padding."""
    has_label_KBL = np.zeros_like(batch.loss_mask_KBL)
    has_label_KBL[..., :-1] = batch.loss_mask_KBL[..., 1:]  # position t predicts token t + 1
    n_labels_K11 = np.maximum(has_label_KBL.sum(axis=(1, 2), keepdims=True), 1)
    return np.asarray(has_label_KBL / n_labels_K11, dtype=np.float32)
