"""Kernels that look at pairs: a value for every position of a row with every position of a unit, mean over both.

    a_{i,e} = 1/(|P_i||P_e|) sum_{t in P_i} sum_{s in P_e} value(t, s)

Shape letters: P row positions, S unit positions, N rows, E units.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# Values held at once: 4 MB in float32, small enough to stay near the cores.
BLOCK_ELEMENTS = 1024 * 1024


def pair_sums(value_PS: Callable[[slice], Tensor], row_P: Tensor, n_rows: int, unit_S: Tensor, n_units: int) -> Tensor:
    """Mean over a row's positions of the sum over a unit's, (n_rows, E), float32; a row without positions has 0.

    Args:
        value_PS: values of all row positions with a block of unit positions; the mean over a unit's is folded in.
        row_P: which row each position belongs to, in [0, n_rows).
        unit_S: which unit each position belongs to.
    """
    sum_NE = torch.zeros(n_rows, n_units, device=row_P.device)
    step = max(1, BLOCK_ELEMENTS // max(1, len(row_P)))
    for start in range(0, len(unit_S), step):
        block = slice(start, start + step)
        sum_NS = sum_NE.new_zeros(n_rows, len(unit_S[block])).index_add_(0, row_P, value_PS(block))
        sum_NE.index_add_(1, unit_S[block], sum_NS)
    positions_N = torch.bincount(row_P, minlength=n_rows).clamp(min=1)
    return sum_NE / positions_N[:, None]
