r"""Tilt relevance: the inner product of gradients of one matrix that acts on every hidden state, by one forward pass.

    a_{i,e} = <G_i, G_e> = 1/(|P_i||P_e|) sum_{t in P_i} sum_{s in P_e} <h~_t, h~_s> <delta~_t, delta~_s>
    G_i = 1/|P_i| sum_{t in P_i} h~_t (x) delta~_t

The shift kernel asks what a row wants said more often, wherever: the gradient of a vector b that is added to every
hidden state. This one asks what it wants said more often in situations like these: the gradient of the matrix M in
h + M (h - mean) + b, which the output matrix reads. It is the token kernel with the mistake brought back to hidden
space, delta = W^T xi: H coordinates in place of V, none of which is a token that the moments hardly saw. Either side is
whitened with a large ridge, since of H^2 directions a corpus shows few well.

A row's G is formed, H x H, and multiplied with those of the units: 2 H^2 operations a position, and 2 H^2 E a row.
Shape letters: P row positions, S unit positions, N rows, E units, H hidden width.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from grasp.features.moments import PositionMoments, whitening_map
from grasp.features.token_match import BLOCK_ELEMENTS, CACHED_ELEMENTS

RIDGE = 1.0  # in units of tr / H: at 0.1 rankings move when moments are drawn again (experiments/finetune)


@dataclass(frozen=True, slots=True)
class TiltTargets:
    """The questions' side of the tilt kernel, prepared once a build: positions in order of unit."""

    mean_H: Tensor
    v_SH: Tensor  # W_h^2 (h_s - mean)
    u_SH: Tensor  # W_d^2 delta_s
    unit_S: Tensor
    n_units: int
    kept_EHH: Tensor | None = None  # mean of v_s (x) u_s of every unit, where they fit

    def matrices(self) -> Iterator[tuple[slice, Tensor]]:
        """Units and their matrices, (E', H, H), no more at once than fit."""
        if self.kept_EHH is not None:
            yield slice(None), self.kept_EHH
            return
        for units, part in _blocks(self.unit_S, self.n_units, BLOCK_ELEMENTS // self.v_SH.shape[1] ** 2):
            own_S = self.unit_S[part] - units.start
            yield units, _mean_products(self.v_SH[part], self.u_SH[part], own_S, units.stop - units.start)


def prepare_tilt(
    hidden_SH: Tensor, delta_SH: Tensor, unit_S: Tensor, n_units: int, moments: PositionMoments
) -> TiltTargets:
    """Fold the whitening of both sides into the units.

    Args:
        hidden_SH: hidden states at the units' supervised positions.
        delta_SH: `hidden_gradient` there.
        unit_S: which unit each position belongs to.
        moments: with those of `input`.
    Source: ours, not in the paper; as eq:kfac-inner-product, of a matrix that acts on the hidden states.
    """
    assert moments.input is not None
    device = hidden_SH.device
    unit_S, order = torch.sort(unit_S, stable=True)
    mean_H = torch.from_numpy(moments.token.mean_H).to(device)
    hidden_HH, delta_HH = (
        torch.from_numpy(map_HH @ map_HH).to(device)
        for map_HH in (
            whitening_map(moments.token.covariance_HH, RIDGE),
            whitening_map(moments.input.second_moment, RIDGE),
        )
    )
    v_SH = ((hidden_SH[order].double() - mean_H) @ hidden_HH).float()
    u_SH = (delta_SH[order].double() @ delta_HH).float()
    targets = TiltTargets(mean_H.float(), v_SH, u_SH, unit_S, n_units)
    if n_units * v_SH.shape[1] ** 2 > CACHED_ELEMENTS:
        return targets
    return replace(targets, kept_EHH=_mean_products(v_SH, u_SH, unit_S, n_units))


def tilt_relevance(targets: TiltTargets, hidden_PH: Tensor, delta_PH: Tensor, row_P: Tensor, n_rows: int) -> Tensor:
    """Relevance of `n_rows` rows for all units, (n_rows, E), float32.

    Args:
        hidden_PH: hidden states at the rows' used positions.
        delta_PH: `hidden_gradient` there.
        row_P: which row each belongs to, in [0, n_rows), in order.
    Positive: training on the row should lower the unit's loss.
    Memory: the matrices of some rows and of some units, 256 MB each in float32, or one of either.
    """
    centred_PH = hidden_PH.float() - targets.mean_H
    out_NE = centred_PH.new_empty(n_rows, targets.n_units)
    for rows, part in _blocks(row_P, n_rows, CACHED_ELEMENTS // centred_PH.shape[1] ** 2):
        row_NHH = _mean_products(centred_PH[part], delta_PH[part], row_P[part] - rows.start, rows.stop - rows.start)
        for units, unit_EHH in targets.matrices():
            out_NE[rows, units] = row_NHH.flatten(1) @ unit_EHH.flatten(1).T
    return out_NE


def _blocks(owner_P: Tensor, n: int, size: int) -> Iterator[tuple[slice, slice]]:
    """At most `size` owners at a time, one at least, and their positions."""
    starts = np.arange(0, n, max(1, size))
    edges = torch.searchsorted(owner_P.contiguous(), torch.tensor([*starts, n], device=owner_P.device)).tolist()
    for k, start in enumerate(starts.tolist()):
        yield slice(start, min(start + max(1, size), n)), slice(edges[k], edges[k + 1])


def _mean_products(left_PH: Tensor, right_PH: Tensor, owner_P: Tensor, n: int) -> Tensor:
    """Mean of left_t (x) right_t over the positions of each of `n` owners, which stand in order: (n, H, H)."""
    count_N = torch.bincount(owner_P, minlength=n)
    place_P = torch.arange(len(owner_P), device=owner_P.device) - (count_N.cumsum(0) - count_N)[owner_P]
    shape = n, int(count_N.max()), left_PH.shape[1]
    left_NLH, right_NLH = left_PH.new_zeros(shape), right_PH.new_zeros(shape)
    left_NLH[owner_P, place_P] = left_PH / count_N[owner_P, None]
    right_NLH[owner_P, place_P] = right_PH
    return torch.bmm(left_NLH.transpose(1, 2), right_NLH)
