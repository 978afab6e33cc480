"""The gather-sum through torch's embedding_bag; the only module of `utility` that loads torch.

Reading rows is the limit. Columns are cut into panels that stay in the last-level cache while all subsets pass over
them: at 100,000 rows of 129 columns that is worth 1.5 times a single panel. Where panels would become so narrow that
whole cache lines are read for a few numbers, the table is left in one piece. Long subsets are cut into pieces that are
added up in float64: a float32 sum of n numbers loses up to sqrt(n) of its last digits.
Shape letters: B subsets, N rows, C value columns.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array

F64 = NDArray[np.float64]

PANEL_BYTES = 16 << 20
MIN_PANEL = 24
PIECE = 128


@dataclass(frozen=True, slots=True)
class PackedValues:
    """Values of N rows as float32 tables of neighbouring columns."""

    panels: tuple[torch.Tensor, ...]

    @classmethod
    def pack(cls, values_NC: NDArray[np.float32]) -> Self:
        """Cut the columns into panels of about equal width; one copy of the values."""
        n_rows, width = values_NC.shape
        count = -(-n_rows * width * 4 // PANEL_BYTES)
        if width < count * MIN_PANEL:
            count = 1
        cuts = np.array_split(np.arange(width), count)
        return cls(tuple(torch.from_numpy(np.ascontiguousarray(values_NC[:, cut[0] : cut[-1] + 1])) for cut in cuts))


def sums(packed: PackedValues, weights_BN: csr_array) -> F64:
    """(B, C) sum_i w_i x_i of one block, within 2e-6 of sum_i |w_i x_i|: float32 within PIECE rows, float64 across."""
    offset, first_B = _pieces(weights_BN.indptr)
    index = torch.from_numpy(weights_BN.indices)  # int32 or int64, as scipy chose for both
    plain = bool(np.all(weights_BN.data == 1.0))
    weight = None if plain else torch.from_numpy(weights_BN.data.astype(np.float32))
    parts = [
        torch.nn.functional.embedding_bag(
            index, panel, torch.from_numpy(offset), mode="sum", per_sample_weights=weight, include_last_offset=True
        )
        for panel in packed.panels
    ]
    pieces_PC = torch.cat(parts, dim=1).numpy().astype(np.float64)
    return pieces_PC if len(first_B) == len(pieces_PC) else np.add.reduceat(pieces_PC, first_B, axis=0)


def _pieces(indptr: NDArray[np.integer]) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
    """Where pieces of at most PIECE entries begin (and the last ends), and the first piece of each subset.

    A subset without entries has one empty piece.
    """
    length_B = np.diff(indptr)
    count_B = np.maximum(-(-length_B // PIECE), 1)
    first_B = np.concatenate([[0], np.cumsum(count_B)[:-1]]).astype(np.int64)
    place_P = np.arange(count_B.sum()) - np.repeat(first_B, count_B)
    start_P = np.repeat(indptr[:-1], count_B) + place_P * PIECE
    return np.append(start_P, indptr[-1]).astype(indptr.dtype), first_B
