r"""The inner product of K-FAC-preconditioned gradients of the output layer, exact, without a backward pass.

    a_{i,e} = 1/(|P_i||P_e|) sum_{t in P_i} sum_{s in P_e} <h~_t, h~_s> (xi_t^T D xi_s)

P_i and P_e are the positions with loss of row i and unit e, h the hidden states and xi the residuals, whose outer
product h_t (x) xi_t is the gradient of the output layer at position t. K-FAC approximates the Hessian by a Kronecker
product: h~ = W (h - mean) is whitened, and D is a diagonal preconditioner (`whitening`).

With v_s = W^2 (h_s - mean) all moments are on the unit's side, and the sum over t can be computed first, for each
vocabulary coordinate k:

    a_{i,e} = 1/(|P_i||P_e|) sum_s sum_{k in supp(xi_s)} D_k xi_{s,k} <v_s, G_{i,k}>
    G_{i,k} = sum_t xi_{t,k} (h_t - mean)

A row costs O(|P_i| K H) to compute G at the coordinates that units use, and O(H nnz) to contract it, with nnz the
nonzeros of all units' residuals after summing over the positions of a unit. No H x V matrix is formed, and all is done
by matrix products. Start with `prepare_targets` and `output_layer_relevance`. Labels `eq:` in "Source" are those of the
paper; docs/paper_map.md lists them.

Shape letters: P row positions, S unit positions, E units, C coordinates of units, K kept per residual, H width.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from grasp.kernels.kernel import UNITS_PER_BLOCK, Kernel
from grasp.kernels.whitening import HiddenMoments, Whitener
from grasp.models.batch import Batch
from grasp.models.residuals import SparseResidual

# Elements of one block of G, (coordinates x rows x H): 64 MB in float32.
BLOCK_ELEMENTS = 16 * 1024 * 1024

# Units' weighted vectors are computed once per build if they fit in 256 MB, else once per call.
CACHED_ELEMENTS = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class CoordinateBlock:
    """Vocabulary coordinates that are contracted together, by one batched matrix product.

    Few coordinates (frequent tokens) are in the residuals of every unit, most in those of a few units. A single matrix
    would be mostly padding, so coordinates are sorted by their number of units and divided into blocks; within a block
    they are padded to the largest number.
    """

    start: int  # compact index of the first coordinate
    unit_CE: Tensor  # int64, units that have the coordinate, padded with E
    present_CE: Tensor  # bool, False where padded
    # Arguments of `weighted_sums` for each (coordinate, unit): unit positions, offsets, weights D_k xi_{s,k} / |P_e|
    weighted_positions: tuple[Tensor, Tensor, Tensor]
    vector_CEH: Tensor | None = None  # if it is cached

    def vectors(self, v_SH: Tensor) -> Tensor:
        """Return 1/|P_e| sum_{s in P_e} D_k xi_{s,k} v_s for every unit that has the coordinate, (C, E', H).

        E' is the largest number of units that have a coordinate of the block.
        """
        if self.vector_CEH is not None:
            return self.vector_CEH
        padded = v_SH.new_zeros(*self.unit_CE.shape, v_SH.shape[1])
        padded[self.present_CE] = weighted_sums(v_SH, *self.weighted_positions)
        return padded


@dataclass(frozen=True, slots=True)
class OutputLayerTargets:
    """The units' side of the kernel, computed once per build."""

    mean_H: Tensor
    v_SH: Tensor  # float32, W^2 (h_s - mean)
    compact_V: Tensor  # int64, vocabulary coordinate -> compact index, -1 if no unit has it
    blocks: tuple[CoordinateBlock, ...]
    n_units: int


def prepare_targets(
    hidden_SH: Tensor, residual: SparseResidual, unit_S: Tensor, n_units: int, whitener: Whitener, rows: int
) -> OutputLayerTargets:
    """Fold whitening, preconditioning and the mean over a unit's positions into the units.

    Args:
        hidden_SH: hidden states at the units' supervised positions.
        residual: sparse residuals at these positions.
        unit_S: unit of each position.
        n_units: number of units.
        whitener: whitening W of hidden states, and preconditioner D of residuals.
        rows: rows per later call, which determines the size of coordinate blocks, not the result.
    Source: eq:kfac-inner-product, taken per token. Deviation: no pooling before the outer product, no damping.
    """
    device, vocab = hidden_SH.device, len(whitener.precondition_V)
    # <W x, W y> = <x, W^2 y> since W is symmetric: whitening the units twice leaves only the centring to the rows.
    # Products with W^2 are computed in float64, since its condition number is that of the covariance, and stored in
    # float32.
    square_HH = torch.from_numpy(whitener.map_HH @ whitener.map_HH).to(device)
    mean_H = torch.from_numpy(whitener.mean_H).to(device)
    v_SH = ((hidden_SH.double() - mean_H) @ square_HH).float()
    precondition_V = torch.from_numpy(whitener.precondition_V).to(device)
    positions_E = torch.bincount(unit_S, minlength=n_units)
    weight_SK = residual.value_PK.double() * precondition_V[residual.index_PK] / positions_E[unit_S][:, None]

    # Nonzero entries D_k xi_{s,k} / |P_e|; coordinates sorted by their number of units, descending.
    is_nonzero_SK = weight_SK.float() != 0
    coordinate, weight = residual.index_PK[is_nonzero_SK], weight_SK.float()[is_nonzero_SK]
    position = torch.arange(len(unit_S), device=device)[:, None].expand_as(is_nonzero_SK)[is_nonzero_SK]
    pairs = torch.unique(coordinate * n_units + unit_S[position])
    n_units_V = torch.bincount(torch.div(pairs, n_units, rounding_mode="floor"), minlength=vocab)
    n_used = int((n_units_V > 0).sum())
    by_units = torch.argsort(n_units_V, descending=True, stable=True)[:n_used]
    compact_V = torch.full((vocab,), -1, dtype=torch.int64, device=device)
    compact_V[by_units] = torch.arange(n_used, device=device)

    # Sort entries by (coordinate, unit), so that those of one unit at one coordinate are contiguous.
    key, order = torch.sort(compact_V[coordinate] * n_units + unit_S[position], stable=True)
    pair, entries = torch.unique_consecutive(key, return_counts=True)
    # offsets of entries by (coordinate, unit) pair, and of pairs by coordinate
    offset, pair_offset = (F.pad(torch.cumsum(count, 0), (1, 0)) for count in (entries, n_units_V[by_units]))
    blocks = []
    start, counts = 0, n_units_V[by_units].cpu().numpy()
    max_coordinates = max(1, BLOCK_ELEMENTS // (v_SH.shape[1] * rows))
    while start < n_used:
        # A block ends at a coordinate with half as many units as its first one, so that padding at most doubles the
        # work.
        half_stop = int(np.searchsorted(-counts, -(int(counts[start]) // 2), side="left"))  # counts are descending
        stop = min(max(half_stop, start + 1), start + max_coordinates, n_used)
        pair_start, pair_stop = int(pair_offset[start]), int(pair_offset[stop])
        entry_start, entry_stop = int(offset[pair_start]), int(offset[pair_stop])
        entry = order[entry_start:entry_stop]
        column = torch.arange(int(counts[start]), device=device)
        present_CE = column < n_units_V[by_units[start:stop]][:, None]
        unit_CE = torch.full_like(present_CE, n_units, dtype=torch.int64)
        unit_CE[present_CE] = pair[pair_start:pair_stop] % n_units
        weighted_positions = (position[entry], offset[pair_start : pair_stop + 1] - entry_start, weight[entry])
        blocks.append(CoordinateBlock(start, unit_CE, present_CE, weighted_positions))
        start = stop
    if sum(block.unit_CE.numel() for block in blocks) * v_SH.shape[1] <= CACHED_ELEMENTS:
        blocks = [replace(block, vector_CEH=block.vectors(v_SH)) for block in blocks]
    return OutputLayerTargets(mean_H.float(), v_SH, compact_V, tuple(blocks), n_units)


def weighted_sums(vector_XH: Tensor, index: Tensor, offset: Tensor, weight: Tensor) -> Tensor:
    """Sum the weighted vectors of each run of `index`: a sparse-dense product, as an embedding bag.

    Args:
        vector_XH: vectors to sum.
        index: vector of each entry.
        offset: start of each run of entries, and the end of the last one.
        weight: weight of each entry.
    """
    return F.embedding_bag(index, vector_XH, offset, mode="sum", per_sample_weights=weight, include_last_offset=True)


def output_layer_relevance(
    targets: OutputLayerTargets, hidden_PH: Tensor, residual: SparseResidual, row_P: Tensor, n_rows: int
) -> Tensor:
    """Predict the relevance of `n_rows` rows to all units, (n_rows, E), float32.

    Args:
        targets: the units' side, from `prepare_targets`.
        hidden_PH: hidden states at the rows' used positions.
        residual: sparse residuals at these positions.
        row_P: row of each position, in [0, n_rows), ascending.
        n_rows: number of rows.
    Positive: training on the row should lower the unit's loss. Source: eq:kfac-inner-product per token.
    """
    centred_PH = hidden_PH.float() - targets.mean_H

    # Sort entries of the residual by (compact coordinate, row); `offset` is the first entry of each key.
    n_used = sum(len(block.unit_CE) for block in targets.blocks)
    n_keys = n_used * n_rows
    key_type = torch.int32 if n_keys + n_rows < torch.iinfo(torch.int32).max else torch.int64  # half the memory
    compact_V = torch.where(targets.compact_V < 0, n_used, targets.compact_V).to(key_type)
    key_PK = compact_V[residual.index_PK].mul_(n_rows).add_(row_P[:, None].to(key_type))
    key_PK.clamp_(max=n_keys)  # coordinates that no unit has get the last key
    n_positions, n_kept = key_PK.shape
    if key_PK.device.type == "cpu":
        # scipy's CSR to CSC conversion is a counting sort, six times as fast as torch.sort
        start_P = np.arange(n_positions + 1, dtype=key_PK.numpy().dtype) * n_kept
        by_position = residual.value_PK.numpy().ravel(), key_PK.numpy().ravel(), start_P
        by_key = csr_array(by_position, shape=(n_positions, n_keys + 1)).tocsc()
        sorted_entries = by_key.indptr[: n_keys + 1], by_key.indices, by_key.data
        offset, position, value = (torch.from_numpy(array) for array in sorted_entries)
    else:
        key, order = torch.sort(key_PK.reshape(-1), stable=True)
        offset = torch.searchsorted(key, torch.arange(n_keys + 1, device=key.device, dtype=key.dtype))
        position, value = order // n_kept, residual.value_PK.reshape(-1)[order]

    sum_EN = centred_PH.new_zeros(targets.n_units + 1, n_rows)  # the last row receives the padding
    first_keys = [block.start * n_rows for block in targets.blocks]
    bounds = offset[[*first_keys, n_keys]].tolist()  # of all blocks at once, since it waits for a GPU
    for block, (start, stop) in zip(targets.blocks, pairwise(bounds), strict=True):
        n_coordinates = len(block.unit_CE)
        block_offset = offset[block.start * n_rows : (block.start + n_coordinates) * n_rows + 1]
        gradient = weighted_sums(centred_PH, position[start:stop], block_offset - start, value[start:stop])
        gradient_CNH = gradient.view(n_coordinates, n_rows, -1)  # G_{i,k} for the coordinates of the block
        product_CEN = torch.bmm(block.vectors(targets.v_SH), gradient_CNH.transpose(1, 2))
        sum_EN.index_add_(0, block.unit_CE.reshape(-1), product_CEN.reshape(-1, n_rows))
    positions_N = torch.bincount(row_P, minlength=n_rows).clamp(min=1)  # a row without positions has relevance 0
    return (sum_EN[:-1] / positions_N).T.contiguous()


class OutputLayer(Kernel):
    """The kernel of the gradients of the output layer."""

    name = "output_layer"
    moment_types = (HiddenMoments,)

    def prepare(self, units: Batch) -> None:
        whitener = Whitener.from_settings(self.moments(HiddenMoments).value, self.settings)
        self._targets = prepare_targets(
            units.hidden_PH, units.residual, units.row_P, units.n_rows, whitener, UNITS_PER_BLOCK
        )

    def score(self, batch: Batch) -> Tensor:
        return output_layer_relevance(self._targets, batch.hidden_PH, batch.residual, batch.row_P, batch.n_rows)
