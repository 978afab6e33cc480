r"""Token relevance: the exact inner product of K-FAC-preconditioned output-layer gradients, without a backward pass.

    a_{i,e} = 1/(|P_i||P_e|) sum_{t in P_i} sum_{s in P_e} <h~_t, h~_s> (xi_t^T D xi_s)

With v_s = W^2 (h_s - mean) everything that depends on moments sits on the unit's side, and the sum over t can be
taken first, one vocabulary coordinate k at a time:

    a_{i,e} = 1/(|P_i||P_e|) sum_s sum_{k in supp(xi_s)} D_k xi_{s,k} <v_s, G_{i,k}>
    G_{i,k} = sum_t xi_{t,k} (h_t - mean)

so a row costs O(|P_i| K H) to form G on the coordinates that units use and O(H * nnz of all units' residuals) to
contract it: nothing of size rows x positions x positions, nothing of size H x V, and only matrix products.

Shape letters: P row positions, S unit positions, E units, C coordinates used by units, K kept per residual, H width.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from grasp.features.residuals import SparseResidual
from grasp.features.whitening import Whitener

# Elements of one block of G, (coordinates x rows x H): 64 MB in float32.
BLOCK_ELEMENTS = 16 * 1024 * 1024

# Units' weighted vectors are gathered once per build while they stay under 256 MB, else once per call.
CACHED_ELEMENTS = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class CoordinateBlock:
    """Coordinates used by about equally many unit positions, padded to the largest of them."""

    first: int  # compact number of the first coordinate
    unit_position_CS: Tensor  # int64, padded with S (an all-zero row)
    weight_CS: Tensor  # float32, D_k xi_{s,k}; 0 where padded
    vector_CSH: Tensor | None = None  # D_k xi_{s,k} v_s, where it is kept

    def vectors(self, v_SH: Tensor) -> Tensor:
        """D_k xi_{s,k} v_s for every unit position that has the coordinate, (C, S, H)."""
        if self.vector_CSH is not None:
            return self.vector_CSH
        return v_SH[self.unit_position_CS] * self.weight_CS[:, :, None]


@dataclass(frozen=True, slots=True)
class TokenTargets:
    """The units' side of the token kernel, prepared once per build."""

    mean_H: Tensor
    v_SH: Tensor  # float32, W^2 (h_s - mean), with an all-zero last row for padding
    compact_V: Tensor  # int64, vocabulary coordinate -> compact number, -1 where no unit has it
    blocks: tuple[CoordinateBlock, ...]
    unit_S: Tensor  # int64, unit of each position
    positions_E: Tensor  # float32, |P_e|

    @property
    def n_units(self) -> int:
        return len(self.positions_E)


def prepare_targets(
    hidden_SH: Tensor, residual: SparseResidual, unit_S: Tensor, n_units: int, whitener: Whitener, rows: int
) -> TokenTargets:
    """Fold whitening and preconditioning into the units' positions.

    Args:
        hidden_SH: hidden states at the units' supervised positions.
        residual: their sparse residuals.
        unit_S: which unit each position belongs to.
        rows: rows a later call will pass at once; sets the size of coordinate blocks, not the result.
    Source: eq:kfac-inner-product, taken per token. Deviation: no pooling before the outer product, no damping.
    """
    device = hidden_SH.device
    square = torch.from_numpy(whitener.map_HH @ whitener.map_HH).to(device)
    mean = torch.from_numpy(whitener.mean_H).to(device)
    v_SH = ((hidden_SH.double() - mean) @ square).float()
    precondition_V = torch.from_numpy(whitener.precondition_V).to(device)
    weight_SK = (residual.value_PK.double() * precondition_V[residual.index_PK]).float()
    v_SH = torch.cat([v_SH, v_SH.new_zeros(1, v_SH.shape[1])])
    compact_V, blocks = _coordinate_blocks(residual.index_PK, weight_SK, len(precondition_V), v_SH.shape[1] * rows)
    if sum(block.weight_CS.numel() for block in blocks) * v_SH.shape[1] <= CACHED_ELEMENTS:
        blocks = [replace(block, vector_CSH=block.vectors(v_SH)) for block in blocks]
    return TokenTargets(
        mean_H=mean.float(),
        v_SH=v_SH,
        compact_V=compact_V,
        blocks=tuple(blocks),
        unit_S=unit_S,
        positions_E=torch.bincount(unit_S, minlength=n_units).float(),
    )


def _coordinate_blocks(
    index_SK: Tensor, weight_SK: Tensor, vocab: int, elements: int
) -> tuple[Tensor, list[CoordinateBlock]]:
    """Group coordinates by how many unit positions have them, so that padding stays under a factor of two."""
    n_positions = len(index_SK)
    keep = weight_SK != 0
    coordinate = index_SK[keep]
    position = torch.arange(n_positions, device=index_SK.device)[:, None].expand_as(index_SK)[keep]
    weight = weight_SK[keep]
    count_V = torch.bincount(coordinate, minlength=vocab)
    used = int((count_V > 0).sum())
    by_count = torch.argsort(count_V, descending=True, stable=True)[:used]
    compact_V = torch.full((vocab,), -1, dtype=torch.int64, device=index_SK.device)
    compact_V[by_count] = torch.arange(used, device=index_SK.device)
    order = torch.argsort(compact_V[coordinate], stable=True)
    position, weight = position[order], weight[order]
    count_C = count_V[by_count]
    end_C = torch.cumsum(count_C, 0)
    blocks = []
    first = 0
    counts = count_C.cpu().numpy()
    while first < used:
        widest = int(counts[first])
        same = int(np.searchsorted(-counts, -(widest // 2), side="left"))  # counts fall: the first at half or less
        last = min(max(same, first + 1), first + max(1, BLOCK_ELEMENTS // elements), used)
        blocks.append(_block(first, last, widest, end_C, count_C, position, weight, n_positions))
        first = last
    return compact_V, blocks


def _block(
    first: int,
    last: int,
    widest: int,
    end_C: Tensor,
    count_C: Tensor,
    position: Tensor,
    weight: Tensor,
    pad: int,
) -> CoordinateBlock:
    count = count_C[first:last]
    start = end_C[first:last] - count
    offset = torch.arange(widest, device=position.device)
    present = offset < count[:, None]
    where = torch.where(present, start[:, None] + offset, 0)
    return CoordinateBlock(
        first=first,
        unit_position_CS=torch.where(present, position[where], pad),
        weight_CS=torch.where(present, weight[where], 0.0),
    )


def token_relevance(
    targets: TokenTargets, hidden_PH: Tensor, residual: SparseResidual, row_P: Tensor, n_rows: int
) -> Tensor:
    """Relevance of `n_rows` rows for all units, (n_rows, E), float32.

    Args:
        hidden_PH: hidden states at the rows' used positions.
        residual: their sparse residuals.
        row_P: which row each position belongs to, in [0, n_rows).
    Positive: training on the row should lower the unit's loss. Source: eq:kfac-inner-product per token.
    """
    centred_PH = hidden_PH.float() - targets.mean_H
    entry = _sorted_entries(targets, residual, row_P, n_rows)
    product_NS = centred_PH.new_zeros(n_rows, len(targets.v_SH))
    for block in targets.blocks:
        gradient_CNH = _gradient_block(block, entry, centred_PH, n_rows)
        product_CNS = torch.bmm(gradient_CNH, block.vectors(targets.v_SH).transpose(1, 2))
        flat_NX = product_CNS.transpose(0, 1).reshape(n_rows, -1)
        product_NS.index_add_(1, block.unit_position_CS.reshape(-1), flat_NX)
    sum_NE = product_NS.new_zeros(n_rows, targets.n_units)
    sum_NE.index_add_(1, targets.unit_S, product_NS[:, :-1])
    positions_N = torch.bincount(row_P, minlength=n_rows).clamp(min=1).float()
    return sum_NE / targets.positions_E / positions_N[:, None]


@dataclass(frozen=True, slots=True)
class _Entries:
    """Residual entries on the units' coordinates, sorted by coordinate, then row."""

    key: Tensor  # compact coordinate * n_rows + row
    position: Tensor
    value: Tensor


def _sorted_entries(targets: TokenTargets, residual: SparseResidual, row_P: Tensor, n_rows: int) -> _Entries:
    compact_PK = targets.compact_V[residual.index_PK]
    keep = (compact_PK >= 0) & (residual.value_PK != 0)
    key = (compact_PK * n_rows + row_P[:, None])[keep]
    position = torch.arange(len(row_P), device=row_P.device)[:, None].expand_as(compact_PK)[keep]
    key, order = torch.sort(key, stable=True)
    return _Entries(key=key, position=position[order], value=residual.value_PK[keep][order])


def _gradient_block(block: CoordinateBlock, entry: _Entries, centred_PH: Tensor, n_rows: int) -> Tensor:
    """G on the block's coordinates, (C, N, H): a sparse-times-dense product, as a weighted embedding bag."""
    coordinates = len(block.weight_CS)
    low = block.first * n_rows
    edge = torch.arange(low, low + coordinates * n_rows + 1, device=entry.key.device)
    offset = torch.searchsorted(entry.key, edge)
    begin, end = int(offset[0]), int(offset[-1])
    bag = torch.nn.functional.embedding_bag(
        entry.position[begin:end],
        centred_PH,
        offset - begin,
        mode="sum",
        per_sample_weights=entry.value[begin:end],
        include_last_offset=True,
    )
    return bag.view(coordinates, n_rows, -1)
