"""Scores of every row for every unit, of one forward pass: the built-in rule, other methods, and candidates.

Positive: training on the row should lower the unit's loss. Shape letters: N rows, E units, P positions of rows,
S positions of units, H hidden width, V vocabulary.

    gradient kernels    a_ie = <h_i (x) d_i, h_e (x) d_e>, d = W^T xi, either side whitened by a ridge, or not at all
    input kernels       the same of input tokens and d; the token's weight 1 / (frequency + eps), or 1
    kernel LM           the nearest-neighbour language model of the corpus, linearised: label counts near a unit's
                        hidden states over what lies near them at all
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.finetune.features import Features
from grasp.arrays import F32, F64
from grasp.kernels.embedding import one_hot_tokens
from grasp.kernels.kernel import CorpusMoments
from grasp.kernels.knn import knn_relevance, prepare_knn
from grasp.kernels.output_layer import output_layer_relevance, prepare_targets
from grasp.kernels.whitening import HiddenMoments, SecondMoments, Whitener, preconditioner, whitening_map
from grasp.models.residuals import PooledFeatures, SparseResidual, pool
from grasp.paper.pooled import pooled_relevance, prepare_units

TAU, ALPHA, EPSILON = 0.01, 1.0, 0.3  # the defaults of a build
POOLED = 32


@dataclass(frozen=True)
class Sides:
    """Rows and units, and the moments of the rows' positions, or of some of them."""

    rows: Features
    units: Features
    vocabulary: int
    drawn_P: NDArray[np.int64] | None = None  # positions of the rows that moments are taken over; None: all

    @cached_property
    def moments(self) -> SecondMoments:
        """Of hidden states and residuals."""
        return self._moments(self.rows.hidden_PH, self.rows.index_PK, self.rows.value_PK)

    @cached_property
    def input_moments(self) -> SecondMoments:
        """Of d and one-hot input tokens."""
        ones_P1 = np.ones((len(self.rows.token_P), 1), dtype=np.float32)
        return self._moments(self.rows.delta_PH, self.rows.token_P[:, None], ones_P1)

    def _moments(self, dense_PH: F32, index_PK: NDArray[np.int32], value_PK: F32) -> SecondMoments:
        if self.drawn_P is not None:
            dense_PH, index_PK, value_PK = (values[self.drawn_P] for values in (dense_PH, index_PK, value_PK))
        accumulator = HiddenMoments(CorpusMoments(self.vocabulary))
        for start in range(0, len(dense_PH), 4096):
            part = slice(start, start + 4096)
            accumulator.add(dense_PH[part], index_PK[part], value_PK[part])
        return accumulator.value

    def hidden_map(self, ridge: float | None) -> F64:
        return self._map(self.moments.covariance_HH, ridge)

    def delta_map(self, ridge: float | None) -> F64:
        """Uncentred, as gradients have no offset to take away."""
        return self._map(self.input_moments.second_moment, ridge)

    @staticmethod
    def _map(covariance_HH: F64, ridge: float | None) -> F64:
        return np.eye(len(covariance_HH)) if ridge is None else whitening_map(covariance_HH, ridge)

    @cached_property
    def gradients(self) -> tuple[F32, F32]:
        """mean_t (h_t - mean h) d_t^T of every row and unit, (N, H, H) and (E, H, H)."""
        return tuple(  # type: ignore[return-value]
            _mean_products(side.hidden_PH - self.moments.mean_H.astype(np.float32), side.delta_PH, side)
            for side in (self.rows, self.units)
        )


# ------------------------------------------------------------------------------------------ gradient kernels


def delta_kernel(sides: Sides, hidden_ridge: float | None, delta_ridge: float | None) -> F64:
    """<W_h G_i W_d, W_h G_e W_d>: the head's gradient with d in the place of its residual, whitened on either side."""
    row_NHH, unit_EHH = sides.gradients
    hidden_HH = (sides.hidden_map(hidden_ridge) @ sides.hidden_map(hidden_ridge)).astype(np.float32)
    delta_HH = (sides.delta_map(delta_ridge) @ sides.delta_map(delta_ridge)).astype(np.float32)
    folded_EHH = hidden_HH @ unit_EHH @ delta_HH
    return (row_NHH.reshape(len(row_NHH), -1) @ folded_EHH.reshape(len(folded_EHH), -1).T).astype(np.float64)


def token_kernel(sides: Sides, alpha: float = ALPHA, epsilon: float = EPSILON, tau: float = TAU) -> F64:
    """The token kernel as a build computes it: residuals over vocabulary coordinates, D = (gamma + eps)^-alpha."""
    whitener = Whitener.fit(sides.moments, tau=tau, alpha=alpha, epsilon=epsilon)
    rows, units = sides.rows, sides.units
    targets = prepare_targets(
        torch.from_numpy(units.hidden_PH),
        units.residual,
        torch.from_numpy(units.owner_P),
        units.n,
        whitener,
        rows.n,
    )
    return _blocks(
        rows,
        lambda part, owner_P, n: output_layer_relevance(
            targets, torch.from_numpy(rows.hidden_PH[part]), rows.residual.select(torch.from_numpy(part)), owner_P, n
        ),
    )


def pooled_kernel(sides: Sides) -> F64:
    """The paper's: means over the last 32 positions with loss, whitened by moments of these means."""
    rows, units = (_pooled(side, sides.vocabulary) for side in (sides.rows, sides.units))
    accumulator = HiddenMoments(CorpusMoments(sides.vocabulary))
    accumulator.add(rows.hidden_NH, rows.residual_NV.indices, rows.residual_NV.data)
    whitener = Whitener.fit(accumulator.value, tau=TAU, alpha=ALPHA, epsilon=EPSILON)
    row_NH, unit_EH = ((side.hidden_NH - whitener.mean_H) @ whitener.map_HH for side in (rows, units))
    return pooled_relevance(
        row_NH, rows.residual_NV, prepare_units(unit_EH, units.residual_NV, whitener.precondition_V)
    )


def _pooled(side: Features, vocabulary: int) -> PooledFeatures:
    last_N = np.cumsum(side.count_N)
    tail = np.flatnonzero(last_N[side.owner_P] - np.arange(len(side.owner_P)) <= POOLED)
    chosen = torch.from_numpy(tail)
    owner_P = torch.from_numpy(side.owner_P[tail])
    return pool(torch.from_numpy(side.hidden_PH[tail]), side.residual.select(chosen), owner_P, side.n, vocabulary)


def input_kernel(
    sides: Sides, delta_ridge: float | None = TAU, *, by_frequency: bool = True, alpha: float = ALPHA
) -> F64:
    """The input kernel: equal input tokens, their d whitened; weighed by 1 / (frequency + eps) or not at all."""
    moments = sides.input_moments
    weight_V = preconditioner(moments.gamma_V, alpha, EPSILON) if by_frequency else np.ones(sides.vocabulary)
    whitener = Whitener(np.zeros(len(moments.mean_H)), sides.delta_map(delta_ridge), weight_V)
    rows, units = sides.rows, sides.units
    targets = prepare_targets(
        torch.from_numpy(units.delta_PH),
        one_hot_tokens(torch.from_numpy(units.token_P.astype(np.int64))),
        torch.from_numpy(units.owner_P),
        units.n,
        whitener,
        rows.n,
    )
    token_P = torch.from_numpy(rows.token_P.astype(np.int64))
    return _blocks(
        rows,
        lambda part, owner_P, n: output_layer_relevance(
            targets, torch.from_numpy(rows.delta_PH[part]), one_hot_tokens(token_P[torch.from_numpy(part)]), owner_P, n
        ),
    )


def shift_kernel(sides: Sides, ridge: float = TAU) -> F64:
    """<delta~_i, delta~_e>, means of d over positions: the gradient of one vector added to every hidden state."""
    map_HH = sides.delta_map(ridge)
    means = []
    for side in (sides.rows, sides.units):
        total_NH = np.zeros((side.n, len(map_HH)))
        np.add.at(total_NH, side.owner_P, side.delta_PH @ map_HH)
        means.append(total_NH / side.count_N[:, None])
    return np.asarray(means[0] @ means[1].T)


def local_kernel(sides: Sides, width: float, delta_ridge: float) -> F64:
    """Mean of k(h_t, h_s) <d~_t, d~_s>, k Gaussian, its width in root mean square distances of whitened states."""
    hidden_HH, delta_HH = sides.hidden_map(TAU), sides.delta_map(delta_ridge)
    spread = 2.0 * float(np.sum(hidden_HH * (sides.moments.covariance_HH @ hidden_HH)))
    map_HH = (hidden_HH / (width * spread**0.5)).astype(np.float32)
    row_PH, unit_SH = sides.rows.hidden_PH @ map_HH, sides.units.hidden_PH @ map_HH
    row_PD, unit_SD = (side.delta_PH @ delta_HH.astype(np.float32) for side in (sides.rows, sides.units))
    square_S, count_N = (unit_SH**2).sum(axis=1), sides.rows.count_N
    sums_NS = np.zeros((sides.rows.n, len(unit_SH)))
    for start in range(0, len(row_PH), 4096):
        part = slice(start, start + 4096)
        distance_PS = (row_PH[part] ** 2).sum(axis=1)[:, None] + square_S - 2.0 * row_PH[part] @ unit_SH.T
        value_PS = np.exp(-0.5 * np.maximum(distance_PS, 0.0)) * (row_PD[part] @ unit_SD.T)
        np.add.at(sums_NS, sides.rows.owner_P[part], value_PS)
    return _mean_of_units(sides.units, (sums_NS / count_N[:, None]).T).T


def neighbour_kernel(sides: Sides, sampled: int = 8192) -> F64:
    """As a build computes it: the linearised kernel language model, its means from a sample of the rows' positions."""
    some = slice(None, None, max(1, len(sides.rows.owner_P) // sampled))
    states = sides.rows.hidden_PH[some], sides.rows.label_P[some].astype(np.int64)
    whitener = Whitener.fit(sides.moments, tau=TAU, alpha=ALPHA, epsilon=EPSILON)
    units, rows = sides.units, sides.rows
    label_S1 = torch.from_numpy(units.label_P.astype(np.int64))[:, None]
    residual = SparseResidual(label_S1, torch.zeros(len(label_S1), 1), torch.from_numpy(units.loss_P))
    of_units = torch.from_numpy(units.hidden_PH), residual, torch.from_numpy(units.owner_P), units.n
    targets = prepare_knn(*of_units, whitener, sides.moments, *states)
    label_P = torch.from_numpy(rows.label_P.astype(np.int64))
    return _blocks(
        rows,
        lambda part, owner_P, n: knn_relevance(
            targets, torch.from_numpy(rows.hidden_PH[part]), label_P[torch.from_numpy(part)], owner_P, n
        ),
    )


# ------------------------------------------------------------------------------------------------- inside


def _mean_products(hidden_PH: F32, delta_PH: F32, side: Features) -> F32:
    edges = np.append(np.flatnonzero(np.diff(side.owner_P, prepend=-1)), len(side.owner_P))
    out_NHH = np.zeros((side.n, hidden_PH.shape[1], delta_PH.shape[1]), dtype=np.float32)
    for first, last in pairwise(edges):
        out_NHH[side.owner_P[first]] = hidden_PH[first:last].T @ delta_PH[first:last] / (last - first)
    return out_NHH


def _blocks(rows: Features, score: Callable[[NDArray[np.int64], torch.Tensor, int], torch.Tensor]) -> F64:
    """Rows in blocks that the kernel's memory allows."""
    out = []
    for start in range(0, rows.n, 64):
        stop = min(start + 64, rows.n)
        part = np.flatnonzero((rows.owner_P >= start) & (rows.owner_P < stop))
        out.append(score(part, torch.from_numpy(rows.owner_P[part] - start), stop - start).numpy())
    return np.concatenate(out).astype(np.float64)


def _mean_of_units(units: Features, values_SN: F64) -> F64:
    sums_EN = np.zeros((units.n, values_SN.shape[1]))
    np.add.at(sums_EN, units.owner_P, values_SN)
    return sums_EN / units.count_N[:, None]
