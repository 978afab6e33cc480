r"""The inner product of preconditioned input-embedding gradients, without a backward pass.

    a_{i,e} = 1/(|P_i||P_e|) sum_{t in P_i} sum_{s in P_e} [x_t = x_s] c(x_t) <delta~_t, delta~_s>

The gradient of the loss at position t by the embedding matrix is onehot(x_t) (x) the gradient at that embedding. The
residual stream carries an embedding straight to the output, so the body's Jacobian is taken to be the identity and the
gradient at the embedding to be that at the hidden state, delta_t = W^T xi_t, with W the output matrix. It is exact
where the body is the identity.

This is the kernel `output_layer` with delta in the place of h and onehot(x) in that of xi, so its functions are used as
they are; only tokens that units have cost anything. delta~ = (C + tau tr(C)/H I)^-1/2 delta, with C uncentred, and
c(x) = (f_x + eps)^-alpha, with f_x the share of the token, in the place of D.

Shape letters: P row positions, S unit positions, E units, K kept per residual, H hidden width, V vocabulary.
"""

import torch
from torch import Tensor

from grasp.kernels.kernel import ROWS_AT_ONCE, Batch, Kernel
from grasp.kernels.output_layer import TokenTargets, prepare_targets, token_relevance
from grasp.kernels.whitening import DeltaMoments, Whitener
from grasp.models.head import OutputHead
from grasp.models.residuals import SparseResidual, hidden_gradient


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


class Embedding(Kernel):
    """The kernel as a build calls it."""

    name = "embedding"
    kinds = (DeltaMoments,)

    def prepare(self, units: Batch) -> None:
        whitener = Whitener.of(self.moments(DeltaMoments).value, self.settings, centred=False)
        tokens, of_units = input_tokens(units.input_P), (units.row_P, units.n_rows)
        self._targets = prepare_targets(units.delta_PH, tokens, *of_units, whitener, ROWS_AT_ONCE)

    def score(self, batch: Batch) -> Tensor:
        assert batch.head is not None
        at = batch.residual, batch.input_P, batch.row_P, batch.n_rows
        return input_relevance(self._targets, batch.head, *at)


KERNEL = Embedding
