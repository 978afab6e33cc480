"""Sums through torch, on a GPU where it sees one; the only module of the room that loads torch.

The gather-sum is embedding_bag; sums over masks are products of bits that are unpacked where they are multiplied.

Reading rows is the limit. Columns are cut into panels that stay in the last-level cache while all subsets pass over
them: at 100,000 rows of 129 columns that is worth 1.5 times a single panel. Where panels would become so narrow that
whole cache lines are read for a few numbers, the table is left in one piece. Long subsets are cut into pieces that are
added up in float64: a float32 sum of n numbers loses up to sqrt(n) of its last digits.
Shape letters: B subsets, N rows, C value columns.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array

from grasp.predict.weights import PackedMasks

F64 = NDArray[np.float64]

PANEL_BYTES = 16 << 20
MIN_PANEL = 24
PIECE = 128


@dataclass(frozen=True, slots=True)
class PackedValues:
    """Values of N rows as float32 tables of neighbouring columns."""

    panels: tuple[torch.Tensor, ...]

    @classmethod
    def pack(cls, values_NC: NDArray[np.float32], device: str = "cpu") -> Self:
        """Cut the columns into panels of about equal width; one copy of the values. A GPU has them in one piece."""
        n_rows, width = values_NC.shape
        count = -(-n_rows * width * 4 // PANEL_BYTES)
        if device != "cpu" or width < count * MIN_PANEL:
            count = 1
        cuts = np.array_split(np.arange(width), count)
        parts = (np.ascontiguousarray(values_NC[:, cut[0] : cut[-1] + 1], dtype=np.float32) for cut in cuts)
        return cls(tuple(torch.from_numpy(part).to(device) for part in parts))


def sums(packed: PackedValues, weights_BN: csr_array) -> F64:
    """(B, C) sum_i w_i x_i of one block, within 2e-6 of sum_i |w_i x_i|: float32 within PIECE rows, float64 across."""
    if not weights_BN.shape[0]:
        return np.empty((0, sum(panel.shape[1] for panel in packed.panels)))
    offset, first_B = _pieces(weights_BN.indptr)
    device = packed.panels[0].device
    index = torch.from_numpy(weights_BN.indices).to(device)  # int32 or int64, as scipy chose for both
    plain = bool(np.all(weights_BN.data == 1.0))
    weight = None if plain else torch.from_numpy(weights_BN.data.astype(np.float32)).to(device)
    cuts = torch.from_numpy(offset).to(device)
    parts = [
        torch.nn.functional.embedding_bag(
            index, panel, cuts, mode="sum", per_sample_weights=weight, include_last_offset=True
        )
        for panel in packed.panels
    ]
    pieces_PC = torch.cat(parts, dim=1).cpu().numpy().astype(np.float64)
    return pieces_PC if len(first_B) == len(pieces_PC) else np.add.reduceat(pieces_PC, first_B, axis=0)


def device() -> str:
    """Where sums are made: cuda where torch sees it, else cpu."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def masked_sums(masks: PackedMasks, start: int, values_nC: NDArray[Any], rows: int, device: str) -> F64:
    """(B, C) sums of the rows [start, start + n) whose bit is set: float32 within `rows` of them, float64 across."""
    first, stop = start // 8, -(-(start + len(values_nC)) // 8)
    bits_Bb = torch.from_numpy(np.ascontiguousarray(masks.bits_BN[:, first:stop])).to(device)
    values = torch.from_numpy(np.ascontiguousarray(values_nC, dtype=np.float32)).to(device)
    shift = torch.arange(7, -1, -1, dtype=torch.uint8, device=device)
    out_BC = torch.zeros((len(bits_Bb), values.shape[1]), dtype=torch.float64, device=device)
    skip = start - 8 * first
    for low in range(0, len(values), rows):
        part = values[low : low + rows]
        byte, lead = divmod(low + skip, 8)
        packed_Bb = bits_Bb[:, byte : byte - (-(lead + len(part)) // 8)]
        mask_Bn = (packed_Bb[:, :, None] >> shift & 1).reshape(len(bits_Bb), -1)[:, lead : lead + len(part)]
        out_BC += mask_Bn.to(torch.float32) @ part
    return np.asarray(out_BC.cpu().numpy())


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
