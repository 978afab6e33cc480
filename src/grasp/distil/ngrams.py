"""Hashed byte n-grams of length 3 to 6: features to fit a scorer with (`shares`) and to score with (`mean_over`).

An n-gram is identified by its length and one of 2^18 hash buckets (slots).

Texts are read from Arrow arrays, one byte buffer with offsets, and all operations are vectorised over blocks of many
texts. Long texts are split into pieces at fixed offsets from their start, and n-grams across pieces are ignored, so
the features of a text do not depend on the other texts of the array.

Shape letters: N texts, P bytes of a block, C pieces of texts, K = 4 lengths, V = 2^18 hash buckets per length.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy.sparse import csr_array

from grasp.arrays import F32, F64, I64

LENGTHS = (3, 4, 5, 6)
BITS = 18  # a table of 1 MB fits into the cache of a core; with twice as many buckets scoring takes 1.3 times as long
SLOTS = 1 << BITS
FAMILIARITY_LENGTH = LENGTHS.index(4)  # length whose mean rarity marks texts unlike the training rows
BLOCK_BYTES = 1 << 15  # bytes that are processed at once
PIECE_BYTES = 1 << 14  # longer texts are split
# Multipliers of the rolling hash and of its finalisation. Odd numbers are invertible modulo 2^32, so multiplication
# loses no information.
_STEP, _FINALISE = np.uint32(0x9E3779B1), np.uint32(0x85EBCA6B)


def as_bytes(texts: Sequence[str]) -> pa.LargeBinaryArray:
    """Encode texts as UTF-8; lone surrogates become question marks."""
    return pa.array([text.encode(errors="replace") for text in texts], pa.large_binary())


@dataclass(frozen=True, slots=True)
class _Block:
    """Consecutive pieces of texts: their bytes, and the range of each piece in them."""

    bytes_P: NDArray[np.uint8]
    start_C: I64
    stop_C: I64
    text_C: I64  # index of the text of each piece


def _offsets(texts: pa.LargeBinaryArray) -> I64:
    """Return the offset of each text in the buffer of the array, and the end of the last one, (N + 1,)."""
    return np.frombuffer(texts.buffers()[1], dtype=np.int64)[texts.offset : texts.offset + len(texts) + 1]


def _slots(texts: pa.LargeBinaryArray) -> Iterator[tuple[_Block, int, I64]]:
    """Yield, per block and n-gram length, the hash bucket of the n-gram that starts at each byte.

    The buckets are a view of a buffer that is reused by the next iteration.
    """
    byte, rolling, finalised = (np.empty(BLOCK_BYTES, dtype=np.uint32) for _ in range(3))
    slot = np.empty(BLOCK_BYTES, dtype=np.int64)
    offsets = _offsets(texts)
    buffer = texts.buffers()[2]
    data = np.empty(0, np.uint8) if buffer is None else np.frombuffer(buffer, dtype=np.uint8)
    pieces_N = -(-np.diff(offsets) // PIECE_BYTES)
    text_C = np.repeat(np.arange(len(texts)), pieces_N)
    piece_number_C = np.arange(len(text_C)) - np.repeat(np.cumsum(pieces_N) - pieces_N, pieces_N)
    start_C = offsets[:-1][text_C] + piece_number_C * PIECE_BYTES
    stop_C = np.minimum(start_C + PIECE_BYTES, offsets[1:][text_C])
    end = 0
    while end < len(text_C):  # consecutive pieces of at most BLOCK_BYTES bytes together
        begin, base = end, start_C[end]
        end = max(begin + 1, int(np.searchsorted(stop_C, base + BLOCK_BYTES, side="right")))
        pieces = slice(begin, end)
        block = _Block(data[base : stop_C[end - 1]], start_C[pieces] - base, stop_C[pieces] - base, text_C[pieces])
        size = len(block.bytes_P)
        byte[:size] = rolling[:size] = block.bytes_P
        for length in range(2, LENGTHS[-1] + 1):
            count = max(0, size - length + 1)
            np.multiply(rolling[:count], _STEP, out=rolling[:count])  # h <- h * step + next byte, modulo 2^32
            np.add(rolling[:count], byte[length - 1 : size], out=rolling[:count])
            if length not in LENGTHS:
                continue
            np.multiply(rolling[:count], _FINALISE, out=finalised[:count])
            # the highest bits of the product depend on all bits of the hash
            np.right_shift(finalised[:count], np.uint32(32 - BITS), out=slot[:count], casting="unsafe")
            yield block, LENGTHS.index(length), slot[:count]


def _crossing_positions(block: _Block, length: int, count: int) -> I64:
    """Return the positions whose n-gram extends beyond the piece in which it starts."""
    last_positions = block.stop_C[:, None] - np.arange(1, length)
    crossing = last_positions[last_positions >= block.start_C[:, None]]
    return crossing[crossing < count]


def mean_over(texts: pa.LargeBinaryArray, tables_KV: F32, rarity_V: F32) -> tuple[F64, F64]:
    """Compute the score and the rarity of every text.

    The score is the sum over lengths of the mean value of the n-grams of that length; a length longer than the text
    contributes 0. The rarity is the mean over n-grams of 4 bytes.

    Args:
        texts: UTF-8 texts.
        tables_KV: value of each hash bucket, one table per n-gram length.
        rarity_V: rarity of each hash bucket of n-grams of 4 bytes.

    Returns:
        Score and rarity, (N,) each.
    """
    sum_KN = np.zeros((len(LENGTHS) + 1, len(texts)))
    value = np.empty(BLOCK_BYTES, dtype=np.float32)
    for block, k, slot_P in _slots(texts):
        crossing = _crossing_positions(block, LENGTHS[k], len(slot_P))
        for row, table_V in ((k, tables_KV[k]), *([(len(LENGTHS), rarity_V)] if k == FAMILIARITY_LENGTH else [])):
            np.take(table_V, slot_P, out=value[: len(slot_P)], mode="wrap")
            value[len(slot_P) : len(block.bytes_P)] = 0.0
            value[crossing] = 0.0
            # sums of float32 values in float64: a text has up to 2^14 n-grams per piece
            sum_C = np.add.reduceat(value[: len(block.bytes_P)], block.start_C, dtype=np.float64)
            np.add.at(sum_KN[row], block.text_C, sum_C)
    full_pieces_N, last_bytes_N = np.divmod(np.diff(_offsets(texts)), PIECE_BYTES)
    count_KN = [full_pieces_N * (PIECE_BYTES - n + 1) + np.maximum(last_bytes_N - n + 1, 0) for n in LENGTHS]
    divisor_KN = np.maximum(count_KN, 1)
    return (sum_KN[:-1] / divisor_KN).sum(axis=0), sum_KN[-1] / divisor_KN[FAMILIARITY_LENGTH]


def shares(texts: pa.LargeBinaryArray) -> csr_array:
    """Return the relative frequency of every n-gram among those of its length in a text, (N, K V).

    `shares(texts) @ tables_KV.ravel()` equals the scores of `mean_over(texts, tables_KV, ...)`.
    """
    columns, rows = [np.empty(0, np.int32)], [np.empty(0, np.int32)]
    for block, k, slot_P in _slots(texts):
        inside = np.ones(len(slot_P), dtype=np.bool_)
        inside[_crossing_positions(block, LENGTHS[k], len(slot_P))] = False
        columns.append((slot_P[inside] + k * SLOTS).astype(np.int32))
        text_P = np.repeat(block.text_C, block.stop_C - block.start_C)
        rows.append(text_P[: len(slot_P)][inside].astype(np.int32))
    coordinates = (np.concatenate(rows), np.concatenate(columns))
    ones = np.ones(len(coordinates[0]), np.float32)
    counts = csr_array((ones, coordinates), shape=(len(texts), len(LENGTHS) * SLOTS))
    counts.sum_duplicates()
    group = np.repeat(np.arange(len(texts)), np.diff(counts.indptr)) * len(LENGTHS) + (counts.indices >> BITS)
    counts.data /= np.bincount(group, weights=counts.data)[group].astype(np.float32)
    return counts
