"""Sparse output residuals xi = p - onehot(label), of which the top-k entries and the label are kept, and row averages.

The residual at a position is the gradient of its loss with respect to the logits; with the hidden state h, the outer
product h (x) xi is the gradient with respect to the weight W of the output layer. Start with `head_residual`.

Shape letters: P positions, N rows, V vocabulary, K kept probabilities, H hidden width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from grasp.arrays import F32
from grasp.models.head import OutputHead

# Logits in memory at the same time, in elements: 32 MB in float32 fit a CPU cache; a GPU needs larger chunks.
LOGIT_ELEMENTS = 8 * 1024 * 1024
GPU_LOGIT_ELEMENTS = 64 * 1024 * 1024

# Elements of a half-precision output matrix that are converted to float32 at once: 64 MB.
GATHERED_ELEMENTS = 16 * 1024 * 1024

# Two-level top-k is faster if there are many more coordinates than k.
TOP_K_BLOCK = 16
TWO_LEVEL_RATIO = 64


@dataclass(frozen=True, slots=True)
class SparseResidual:
    """Residuals at P positions, with K + 1 entries each; the last is the label's, or 0 if the label is in the top K."""

    index_PK: Tensor  # int64, vocabulary coordinates
    value_PK: Tensor  # d loss / d (W h), W the output layer's weight; float32 (float64 of a model in float64)
    loss_P: Tensor  # the same dtype, nats
    truncated_P: Tensor | None = None  # sum of the values that were cut off; None: minus the sum of `value_PK`

    @property
    def label_P(self) -> Tensor:  # noqa: N802 - a shape suffix
        """Return the next token at each position, int64."""
        return self.index_PK[:, -1]

    def select(self, index_P: Tensor | slice) -> "SparseResidual":
        """Return the residuals at some positions, given by mask, index or slice."""
        truncated_P = None if self.truncated_P is None else self.truncated_P[index_P]
        return SparseResidual(self.index_PK[index_P], self.value_PK[index_P], self.loss_P[index_P], truncated_P)


def top_k(values_PV: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest values of each row, (P, k), in no particular order.

    Coordinates are divided into strided blocks of `TOP_K_BLOCK`. The k largest values are in the k blocks with the
    largest maxima, so only these are searched. The result is exact, up to ties.
    """
    vocab = values_PV.shape[1]
    n_blocks = vocab // TOP_K_BLOCK
    if n_blocks >= TWO_LEVEL_RATIO // TOP_K_BLOCK * k:
        n_in_blocks = n_blocks * TOP_K_BLOCK
        grid = values_PV[:, :n_in_blocks].reshape(len(values_PV), TOP_K_BLOCK, n_blocks)
        # Each of the k largest values is in a block whose maximum is at least as large; there are at most k of these.
        block_PK = top_k(grid.amax(dim=1), k)
        stride = torch.arange(TOP_K_BLOCK, device=values_PV.device) * n_blocks
        candidate = (block_PK[:, :, None] + stride).flatten(1)
        remainder = torch.arange(n_in_blocks, vocab, device=values_PV.device).expand(len(values_PV), -1)
        candidate = torch.cat([candidate, remainder], dim=1)
        return candidate.gather(1, top_k(values_PV.gather(1, candidate), k))
    k = min(k, vocab)
    if values_PV.device.type != "cpu":
        return values_PV.topk(k, dim=1, sorted=False).indices
    # On a CPU, numpy's vectorised partition takes a quarter of torch's time, and that of values half of argpartition's.
    values, first = values_PV.to(torch.promote_types(values_PV.dtype, torch.float32)).numpy(), vocab - k
    kth_value_P = np.partition(values, first, axis=1)[:, first]
    flat_index = np.flatnonzero(values >= kth_value_P[:, None])
    if len(flat_index) != len(values) * k:  # ties with the k-th value
        return torch.from_numpy(np.argpartition(values, first, axis=1)[:, first:])
    return torch.from_numpy((flat_index % vocab).reshape(-1, k))


def sparse_residual(
    logits_PV: Tensor, label_P: Tensor, k: int, slope: Tensor | float = 1.0, *, probability_PV: Tensor | None = None
) -> SparseResidual:
    """Compute residuals from logits, and keep the k largest probabilities and the label.

    Args:
        logits_PV: inputs of the softmax; the residual has their dtype, but float32 if they have half precision.
        label_P: int64, the next token.
        k: number of probabilities that are kept, K.
        slope: d logits / d (W h) if the model scales or caps its logits, so that h (x) xi is the exact gradient with
            respect to the weight W of the output layer; a tensor has the shape of the logits, or (V,).
        probability_PV: softmax of the logits in the dtype of the residual, if it is known already.
    Source: eq:token-residual. Deviation: with a scaled or capped head, xi contains the slope; else none.
    """
    work, top_PK = torch.promote_types(logits_PV.dtype, torch.float32), top_k(logits_PV, k)
    index_PK = torch.cat([top_PK, label_P[:, None]], dim=1)
    slope_PK = slope.expand_as(logits_PV).gather(1, index_PK) if isinstance(slope, Tensor) else slope
    if probability_PV is None:
        probability_PV = torch.softmax(logits_PV, dim=1, dtype=work)
    value_PK = probability_PV.gather(1, index_PK)
    logit_PK = logits_PV.gather(1, index_PK).to(work)
    # log Z = z_top - log p_top. The largest probability is at least 1 / V, so its logarithm is accurate.
    top_logit_P, top = logit_PK.max(dim=1)
    log_norm_P = top_logit_P - value_PK.gather(1, top[:, None])[:, 0].log()
    is_label_PK = top_PK == label_P[:, None]
    value_PK[:, :-1] -= is_label_PK.to(value_PK.dtype)
    value_PK[:, -1] = torch.where(is_label_PK.any(dim=1), 0.0, value_PK[:, -1] - 1.0)
    value_PK *= slope_PK
    truncated_P = None
    if isinstance(slope, Tensor):  # with a slope per logit, the values of all logits do not sum to 0
        total_P = (probability_PV * slope).sum(dim=1) - slope.expand_as(logits_PV).gather(1, label_P[:, None])[:, 0]
        truncated_P = total_P - value_PK.sum(dim=1)
    return SparseResidual(index_PK, value_PK, log_norm_P - logit_PK[:, -1], truncated_P)


def head_residual(head: OutputHead, hidden_PH: Tensor, label_P: Tensor, k: int, vocab: int) -> SparseResidual:
    """Apply the head to P hidden states in chunks of bounded size, and return their sparse residuals."""
    elements = LOGIT_ELEMENTS if hidden_PH.device.type == "cpu" else GPU_LOGIT_ELEMENTS
    chunk_positions = min(max(1, elements // vocab), len(hidden_PH))
    buffer = hidden_PH.new_empty(chunk_positions, vocab)
    work = torch.promote_types(hidden_PH.dtype, torch.float32)
    scratch = hidden_PH.new_empty(chunk_positions, vocab, dtype=work)
    # A GPU's softmax converts half precision as it reads it, so that no float32 copy of the logits is written and read.
    is_copied = hidden_PH.device.type == "cpu" or head.scale != 1.0 or head.cap is not None
    residuals = []
    for start in range(0, len(hidden_PH), chunk_positions):
        stop = start + chunk_positions
        hidden, label = hidden_PH[start:stop], label_P[start:stop]
        logits = head.linear_logits(hidden, out=buffer[: len(hidden)])
        logits = head.link(logits.to(work)) if is_copied else logits
        probability = torch.softmax(logits, dim=1, dtype=work, out=scratch[: len(hidden)])
        residuals.append(sparse_residual(logits, label, k, head.slope(logits), probability_PV=probability))
    return stack_residuals(residuals)


def stack_residuals(residuals: Sequence[SparseResidual]) -> SparseResidual:
    """Concatenate residuals of several batches."""
    if len(residuals) == 1:
        return residuals[0]
    truncated = [residual.truncated_P for residual in residuals if residual.truncated_P is not None]
    return SparseResidual(
        index_PK=torch.cat([residual.index_PK for residual in residuals]),
        value_PK=torch.cat([residual.value_PK for residual in residuals]),
        loss_P=torch.cat([residual.loss_P for residual in residuals]),
        truncated_P=torch.cat(truncated) if truncated else None,
    )


@dataclass(frozen=True, slots=True)
class PooledFeatures:
    """Averages over the pooled positions of each row, before whitening of hidden states and scaling of residuals."""

    hidden_NH: F32
    residual_NV: csr_array  # float32, with sorted unique coordinates


def pool(hidden_PH: Tensor, residual: SparseResidual, row_P: Tensor, n_rows: int, vocab: int) -> PooledFeatures:
    """Average hidden states and sparse residuals over the positions of each row.

    Args:
        hidden_PH: hidden states.
        residual: residuals at the same positions.
        row_P: row of each position, in [0, n_rows); every row has at least one position.
        n_rows: number of rows, N.
        vocab: size of the vocabulary, V.
    Source: eq:sequence-pooling. Deviation: none.
    """
    count_N = torch.bincount(row_P, minlength=n_rows).float()
    hidden = hidden_PH.float()
    sum_NH = hidden.new_zeros(n_rows, hidden.shape[1]).index_add_(0, row_P, hidden)
    value_PK = residual.value_PK / count_N[row_P][:, None]
    is_nonzero_PK = value_PK != 0
    # one key per coordinate of the (N, V) result; entries with the same key are added up
    key = (row_P[:, None] * vocab + residual.index_PK)[is_nonzero_PK]
    unique, inverse = torch.unique(key, sorted=True, return_inverse=True)
    value = torch.zeros(len(unique), dtype=torch.float32, device=key.device)
    value.index_add_(0, inverse, value_PK[is_nonzero_PK])
    row = torch.div(unique, vocab, rounding_mode="floor")
    indptr = torch.zeros(n_rows + 1, dtype=torch.int64)
    indptr[1:] = torch.cumsum(torch.bincount(row, minlength=n_rows), 0).cpu()
    return PooledFeatures(
        hidden_NH=(sum_NH / count_N[:, None]).cpu().numpy(),
        residual_NV=csr_array(
            (value.cpu().numpy(), (unique - row * vocab).to(torch.int32).cpu().numpy(), indptr.numpy()),
            shape=(n_rows, vocab),
        ),
    )


def hidden_gradient(head: OutputHead, residual: SparseResidual) -> Tensor:
    """Return delta = W^T xi, the gradient of the loss by the hidden state, (P, H), in the dtype of the residual.

    The residual contains the slope of a scaled or capped head; a bias has no effect. The mass that top-k cut off is
    assumed to be uniform over the vocabulary: otherwise a vector that all rows of W have in common would contribute as
    much as the residual itself. A complete residual sums to 0, so the sum of the entries is minus the mass that was cut
    off; if the slope differs by logit, that mass is `truncated_P`.
    """
    weight_VH = head.matrix()
    index_PK, value_PK = residual.index_PK, residual.value_PK
    if weight_VH.dtype == value_PK.dtype:
        delta_PH = torch.nn.functional.embedding_bag(index_PK, weight_VH, mode="sum", per_sample_weights=value_PK)
    else:
        # Half-precision values would lose digits, and a float32 copy of the matrix can have gigabytes.
        count = max(1, GATHERED_ELEMENTS // (index_PK.shape[1] * weight_VH.shape[1]))
        delta_PH = value_PK.new_empty(len(index_PK), weight_VH.shape[1])
        for start in range(0, len(index_PK), count):
            block = slice(start, start + count)
            gathered_PKH = weight_VH[index_PK[block]].to(value_PK.dtype)
            delta_PH[block] = torch.bmm(value_PK[block, None], gathered_PKH)[:, 0]
    missing_P = value_PK.sum(dim=1) if residual.truncated_P is None else -residual.truncated_P
    assert residual.truncated_P is not None or (head.cap is None and head.factor_V is None)
    return delta_PH.sub_(torch.outer(missing_P, head.mean_H.to(value_PK.dtype)))
