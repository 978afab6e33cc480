"""Which supervised positions of a row are used. Position t predicts token t + 1, so a row of L tokens has L - 1."""

import torch
from torch import Tensor


def position_mask(spec: str, first_B: Tensor, length_B: Tensor, width: int) -> Tensor:
    """Boolean (B, width): position t of row b is used.

    Args:
        spec: `all`, `tail:n` (the last n supervised positions) or `stride:n` (every n-th, the last one included).
        first_B: first supervised position of each row.
        length_B: tokens of each row; the last supervised position is length - 2.
        width: padded length.
    Source: eq:sequence-pooling (tail:32). Deviation: `all` and `stride` are ours.
    """
    t_L = torch.arange(width, device=length_B.device)
    last_B = length_B - 2
    mask_BL = (t_L >= first_B[:, None]) & (t_L <= last_B[:, None])
    kind, _, number = spec.partition(":")
    if kind == "tail":
        mask_BL &= t_L > (last_B - int(number))[:, None]
    elif kind == "stride":
        mask_BL &= (last_B[:, None] - t_L) % int(number) == 0
    return mask_BL
