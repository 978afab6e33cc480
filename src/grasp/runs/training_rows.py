"""Rows on their way into training: which rows come when, and how they become padded batches.

Shape letters: K models, S steps of a window, B rows of a batch, L tokens, N rows.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grasp.corpus.store import RowShard, RowStore
from grasp.errors import ModelError, ShapeError
from grasp.seeds import stream

F64 = NDArray[np.float64]

WINDOW_ROWS = 16_384  # rows fetched at once: a shard on disk is read a few times, not once a batch


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a corpus that one model is trained on: how often each row comes, against the one that comes most."""

    often_N: F64  # from 0, left out, to 1

    @classmethod
    def of(cls, n_rows: int, batch_rows: int, retained: NDArray[np.bool_] | F64 | None) -> "Share":
        """Check a subset.

        Args:
            retained: rows that are kept, or a weight a row: one of weight 2 is seen twice as often as one of weight 1.
        Raises:
            ShapeError: `retained` is not of the corpus.
            ModelError: a negative or non-finite weight; fewer rows than one batch.
        """
        weight_N = np.ones(n_rows) if retained is None else np.asarray(retained, dtype=np.float64)
        if weight_N.shape != (n_rows,):
            raise ShapeError(f"retained: got shape {weight_N.shape}, expected ({n_rows},): one entry a row")
        bad = np.flatnonzero(~(np.isfinite(weight_N) & (weight_N >= 0)))
        if bad.size:
            raise ModelError(f"retained: row {bad[0]} weighs {weight_N[bad[0]]}, expected a finite number >= 0")
        if (kept := np.count_nonzero(weight_N)) < batch_rows:
            raise ModelError(
                f"retained: {kept} of {n_rows} rows, expected at least the {batch_rows} of one batch; retain"
                " more rows or lower the recipe's batch_rows"
            )
        return cls(weight_N / weight_N.max())

    @property
    def fingerprint(self) -> str:
        digest = hashlib.blake2b(np.packbits(self.often_N > 0).tobytes(), digest_size=16)
        if (self.often_N[self.often_N > 0] < 1).any():
            digest.update(self.often_N.tobytes())
        return digest.hexdigest()


def row_order(often_N: NDArray[np.bool_] | F64, *, seed: int, start: int = 0) -> Iterator[NDArray[np.int64]]:
    """Rows in training order from position `start` on, without end, in pieces of at most an epoch.

    Epoch e visits the corpus in one permutation of all its rows, the same for every subset of a seed; rows
    that are not kept are skipped. So any two subsets see the rows they share in the same order. A row that comes less
    often than others is skipped in some epochs: where e a + u passes no whole number, u being its own phase.
    """
    phase_N = stream(seed, "order", "phase").random(len(often_N))
    epoch = 0
    while True:
        seen_N = np.floor((epoch + 1) * often_N + phase_N) > np.floor(epoch * often_N + phase_N)
        if (n_seen := int(np.count_nonzero(seen_N))) > start:
            order = stream(seed, "order", epoch).permutation(len(often_N))
            yield order[seen_N[order]][start:]
        epoch, start = epoch + 1, max(start - n_seen, 0)


def batch_order(
    often_N: NDArray[np.bool_] | F64, *, seed: int, batch_rows: int, first_step: int, last_step: int
) -> Iterator[NDArray[np.int64]]:
    """Rows of each step from `first_step` to before `last_step`, (B,) each; a batch may straddle two
    epochs."""
    pieces = row_order(often_N, seed=seed, start=first_step * batch_rows)
    ready = np.zeros(0, dtype=np.int64)
    for _ in range(first_step, last_step):
        while len(ready) < batch_rows:
            ready = np.concatenate([ready, next(pieces)])
        yield ready[:batch_rows]
        ready = ready[batch_rows:]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """One step for K models: `ids_KBL` padded on the right with 0, and which of these tokens carry loss."""

    row_index_KB: NDArray[np.int64]
    ids_KBL: NDArray[np.int64]
    labelled_KBL: NDArray[np.bool_]


def token_batches(
    rows: RowStore, orders: Sequence[Iterator[NDArray[np.int64]]], *, steps: int, context: int, vocab_size: int
) -> Iterator[TokenBatch]:
    """Batches of `steps` steps, model k fed by ``orders[k]``; rows are fetched for many steps at once.

    Raises:
        ModelError: a row that is longer than `context`, or with a token outside the vocabulary.
    """
    window: list[NDArray[np.int64]] = []
    for step in range(steps):
        window.append(np.stack([next(order) for order in orders]))
        if (len(window) + 1) * window[0].size > WINDOW_ROWS or step == steps - 1:
            yield from _fetched(rows, np.stack(window), context, vocab_size)
            window = []


def _fetched(rows: RowStore, index_SKB: NDArray[np.int64], context: int, vocab_size: int) -> Iterator[TokenBatch]:
    unique, position = np.unique(index_SKB, return_inverse=True)
    fetched = rows.rows(unique)
    starts, lengths = fetched.offsets[:-1], np.diff(fetched.offsets)
    _check(fetched, unique, lengths, context, vocab_size)
    flat = np.append(fetched.flat_ids, 0)  # the last one is what padding reads
    flat_labelled = np.append(
        np.ones(len(fetched.flat_ids), np.bool_) if fetched.labelled is None else fetched.labelled, False
    )
    flat_labelled[starts] = False  # nothing predicts the first token of a row
    for index_KB, chosen_KB in zip(index_SKB, position.reshape(index_SKB.shape), strict=True):
        lengths_KB = lengths[chosen_KB]
        reach_L = np.arange(lengths_KB.max())
        at_KBL = np.where(reach_L < lengths_KB[..., None], starts[chosen_KB][..., None] + reach_L, -1)
        yield TokenBatch(index_KB, flat[at_KBL].astype(np.int64), flat_labelled[at_KBL])


def _check(
    fetched: RowShard, row_index: NDArray[np.int64], lengths: NDArray[np.int64], context: int, vocab_size: int
) -> None:
    long = np.flatnonzero(lengths > context)
    if long.size:
        raise ModelError(
            f"row {row_index[long[0]]} has {lengths[long[0]]} tokens, the recipe reads at most {context}: cut the"
            f" corpus with corpus.max_length {context}, or raise the recipe's context"
        )
    outside = np.flatnonzero((fetched.flat_ids < 0) | (fetched.flat_ids >= vocab_size))
    if outside.size:
        row = np.searchsorted(fetched.offsets, outside[0], side="right") - 1
        raise ModelError(
            f"row {row_index[row]} has token id {fetched.flat_ids[outside[0]]}, the recipe's vocabulary ends at"
            f" {vocab_size - 1}: use the tokenizer that the recipe's vocab_size belongs to"
        )
