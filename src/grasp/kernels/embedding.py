r"""Input relevance: the inner product of preconditioned input-embedding gradients, without a backward pass.

    a_{i,e} = 1/(|P_i||P_e|) sum_{t in P_i} sum_{s in P_e} [x_t = x_s] c(x_t) <delta~_t, delta~_s>

The gradient of the loss at position t by the embedding matrix is onehot(x_t) (x) the gradient at that embedding. The
residual stream carries an embedding straight to the output, so the body's Jacobian is taken to be the identity and the
gradient at the embedding to be that at the hidden state, delta_t = W^T xi_t, with W the output matrix. It is exact
where the body is the identity.

This is the token kernel with delta in the place of h and onehot(x) in that of xi, so its kernel is used as it is; only
tokens that units have cost anything. delta~ = (C + tau tr(C)/H I)^-1/2 delta, with C uncentred, and c(x) =
(f_x + eps)^-alpha, with f_x the share of the token, in the place of D.

The shift kernel compares one vector that is added to every hidden state, the mean of delta over positions:

    a_{i,e} = <delta~_i, delta~_e>,  delta_i = 1/|P_i| sum_{t in P_i} W^T xi_t

It asks what a row and a unit want said more often, wherever it is said: the tone, not the fact. A short fine-tuning of
a model that knows the language moves little else. It is the mean of the input kernel over all pairs of positions,
whatever their tokens.
Shape letters: P row positions, S unit positions, E units, K kept per residual, H hidden width, V vocabulary.
"""

import torch
from torch import Tensor

from grasp.errors import ModelError
from grasp.kernels.output_layer import TokenTargets, token_relevance
from grasp.kernels.whitening import Whitener
from grasp.models.head import OutputHead
from grasp.models.residuals import SparseResidual

# Rows of a half-precision output matrix upcast at once, in elements: 64 MB in float32.
GATHERED_ELEMENTS = 16 * 1024 * 1024


def hidden_gradient(head: OutputHead, residual: SparseResidual) -> Tensor:
    """delta = W^T xi, the gradient of each position's loss by its hidden state, (P, H), in the residual's dtype.

    The residual carries the slope of a scaled or capped head; a bias does not matter. What top-k cut off is taken to be
    spread evenly over the vocabulary. Without it, a vector that all rows of W have in common would add as much as the
    mistake itself. A whole residual adds up to 0, so what is missing of that is what was cut off; where slopes differ
    by logit the residual says how much it is.

    Raises:
        ModelError: the residuals of such a head were kept without it.
    """
    weight_VH = head.matrix()
    index_PK, value_PK = residual.index_PK, residual.value_PK
    if weight_VH.dtype == value_PK.dtype:
        delta_PH = torch.nn.functional.embedding_bag(index_PK, weight_VH, mode="sum", per_sample_weights=value_PK)
    else:
        # values in half precision would lose digits, and a float32 copy of the matrix may be gigabytes
        count = max(1, GATHERED_ELEMENTS // (index_PK.shape[1] * weight_VH.shape[1]))
        delta_PH = value_PK.new_empty(len(index_PK), weight_VH.shape[1])
        for start in range(0, len(index_PK), count):
            block = slice(start, start + count)
            gathered_PKH = weight_VH[index_PK[block]].to(value_PK.dtype)
            delta_PH[block] = torch.bmm(value_PK[block, None], gathered_PKH)[:, 0]
    missing_P = value_PK.sum(dim=1) if residual.rest_P is None else -residual.rest_P
    if residual.rest_P is None and (head.cap is not None or head.factor_V is not None):
        raise ModelError(
            "features: kept by another version, without what top-k cut off of a capped output head; build the artifact "
            "again"
        )
    return delta_PH.sub_(torch.outer(missing_P, head.mean_H.to(value_PK.dtype)))


def input_tokens(token_P: Tensor) -> SparseResidual:
    """One-hot input tokens, in the form of residuals with one entry a position."""
    value_P = torch.ones_like(token_P, dtype=torch.float32)
    return SparseResidual(index_PK=token_P[:, None], value_PK=value_P[:, None], loss_P=torch.zeros_like(value_P))


def input_relevance(
    targets: TokenTargets, head: OutputHead, residual: SparseResidual, token_P: Tensor, row_P: Tensor, n_rows: int
) -> Tensor:
    """Relevance of `n_rows` rows for all units, (n_rows, E), float32.

    Args:
        targets: `prepare_targets` of the units' `hidden_gradient` and `input_tokens`, whitened uncentred.
        residual: sparse residuals at the rows' used positions.
        token_P: the input token at each of them.
        row_P: which row each belongs to, in [0, n_rows), in order.
    Positive: training on the row should lower the unit's loss.
    Source: ours, not in the paper; as eq:kfac-inner-product, of the input embedding.
    Cost: O(K H) a position whose token a unit has, and for each such token a vector of H for every row.
    """
    match_P = targets.compact_V[token_P] >= 0  # the others have nothing to be multiplied with
    delta_PH = hidden_gradient(head, residual.at(match_P))
    matched = token_relevance(targets, delta_PH, input_tokens(token_P[match_P]), row_P[match_P], n_rows)
    matched_N = torch.bincount(row_P[match_P], minlength=n_rows)
    positions_N = torch.bincount(row_P, minlength=n_rows).clamp(min=1)
    return matched * (matched_N / positions_N)[:, None]


def prepare_shift(delta_SH: Tensor, unit_S: Tensor, n_units: int, whitener: Whitener) -> Tensor:
    """Whitening and the mean over positions folded into the units, (E, H), float32.

    Args:
        delta_SH: `hidden_gradient` at the units' supervised positions.
        unit_S: which unit each belongs to.
        whitener: fitted to their moments, uncentred.
    Source: ours, not in the paper; as eq:kfac-inner-product, of a bias of the hidden states.
    """
    square_HH = torch.from_numpy(whitener.map_HH @ whitener.map_HH).to(delta_SH.device)
    return (_means(delta_SH.double(), unit_S, n_units) @ square_HH).float()


def shift_relevance(unit_EH: Tensor, delta_PH: Tensor, row_P: Tensor, n_rows: int) -> Tensor:
    """Relevance of `n_rows` rows for all units, (n_rows, E), float32.

    Args:
        delta_PH: `hidden_gradient` at the rows' used positions.
        row_P: which row each belongs to, in [0, n_rows).
    Positive: training on the row should lower the unit's loss.
    """
    return _means(delta_PH, row_P, n_rows) @ unit_EH.T


def _means(value_PH: Tensor, row_P: Tensor, n_rows: int) -> Tensor:
    count_N = torch.bincount(row_P, minlength=n_rows).clamp(min=1)
    return value_PH.new_zeros(n_rows, value_PH.shape[1]).index_add_(0, row_P, value_PH) / count_N[:, None]
