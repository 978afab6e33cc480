"""Which supervised positions of a row are used. Position t predicts token t + 1: a row of L has at most L - 1."""

from torch import Tensor
from torch.nn import functional as F  # noqa: N812


def supervised_positions(labelled_BL: Tensor) -> Tensor:
    """Boolean (B, L): position t predicts a token that carries loss."""
    return F.pad(labelled_BL[:, 1:], (0, 1))


def position_mask(spec: str, supervised_BL: Tensor) -> Tensor:
    """Boolean (B, L): supervised position t of row b is used.

    Args:
        spec: `all`, `tail:n` (the last n supervised positions) or `stride:n` (every n-th, the last one included).
    Source: eq:sequence-pooling (tail:32). Deviation: `all` and `stride` are ours.
    """
    kind, _, number = spec.partition(":")
    if kind == "all":
        return supervised_BL
    place_BL = supervised_BL.flip(1).cumsum(1).flip(1)  # 1 for the last supervised position, 2 for the one before it
    return supervised_BL & (place_BL <= int(number) if kind == "tail" else (place_BL - 1) % int(number) == 0)
