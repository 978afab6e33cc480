r"""The inner product of preconditioned input-embedding gradients, without a backward pass.

    a_{i,e} = 1/(|P_i||P_e|) sum_{t in P_i} sum_{s in P_e} [x_t = x_s] c(x_t) <delta~_t, delta~_s>

The gradient of the loss at position t with respect to the embedding matrix is onehot(x_t) (x) the gradient with respect
to that embedding. The residual stream carries an embedding directly to the output, so the Jacobian of the body is
approximated by the identity, and the gradient at the embedding by that at the hidden state, delta_t = W^T xi_t, with W
the output matrix. The approximation is exact if the body is the identity.

This is the kernel `output_layer` with delta instead of h and onehot(x) instead of xi, and reuses its functions; only
positions whose token occurs in a unit cost anything. delta~ = (C + tau tr(C)/H I)^-1/2 delta, with C uncentred, and
c(x) = (f_x + eps)^-alpha, with f_x the frequency of the token, instead of D. Start with
`embedding_relevance`. Labels `eq:` in "Source" are those of the paper; docs/paper_map.md lists them.

Shape letters: P row positions, S unit positions, E units, K kept per residual, H hidden width, V vocabulary.
"""

import torch
from torch import Tensor

from grasp.kernels.kernel import UNITS_PER_BLOCK, Kernel
from grasp.kernels.output_layer import OutputLayerTargets, output_layer_relevance, prepare_targets
from grasp.kernels.whitening import DeltaMoments, Whitener
from grasp.models.batch import Batch
from grasp.models.head import OutputHead
from grasp.models.residuals import SparseResidual, hidden_gradient


def one_hot_tokens(token_P: Tensor) -> SparseResidual:
    """Return one-hot input tokens as sparse residuals with one entry per position."""
    value_P = torch.ones_like(token_P, dtype=torch.float32)
    return SparseResidual(index_PK=token_P[:, None], value_PK=value_P[:, None], loss_P=torch.zeros_like(value_P))


def embedding_relevance(
    targets: OutputLayerTargets, head: OutputHead, residual: SparseResidual, token_P: Tensor, row_P: Tensor, n_rows: int
) -> Tensor:
    """Predict the relevance of `n_rows` rows to all units, (n_rows, E), float32.

    Args:
        targets: `prepare_targets` of the units' `hidden_gradient` and `one_hot_tokens`, whitened uncentred.
        head: the output layer, which maps residuals to gradients at the hidden state.
        residual: sparse residuals at the rows' used positions.
        token_P: input token at each of them.
        row_P: row of each position, in [0, n_rows), ascending.
        n_rows: number of rows.
    Positive: training on the row should lower the unit's loss.
    Source: ours, not in the paper; as eq:kfac-inner-product, of the input embedding.
    Cost: O(K H) per position whose token occurs in a unit, and a vector of H per such token and row.
    """
    match_P = targets.compact_V[token_P] >= 0  # the inner product is 0 at all other positions
    delta_PH = hidden_gradient(head, residual.select(match_P))
    matched = output_layer_relevance(targets, delta_PH, one_hot_tokens(token_P[match_P]), row_P[match_P], n_rows)
    # `output_layer_relevance` averages over the matched positions; the mean is over all positions of a row.
    matched_N = torch.bincount(row_P[match_P], minlength=n_rows)
    positions_N = torch.bincount(row_P, minlength=n_rows).clamp(min=1)
    return matched * (matched_N / positions_N)[:, None]


class Embedding(Kernel):
    """The kernel of the gradients of the input embedding."""

    name = "embedding"
    moment_types = (DeltaMoments,)

    def prepare(self, units: Batch) -> None:
        whitener = Whitener.from_settings(self.moments(DeltaMoments).value, self.settings, centred=False)
        tokens = one_hot_tokens(units.input_P)
        self._targets = prepare_targets(units.delta_PH, tokens, units.row_P, units.n_rows, whitener, UNITS_PER_BLOCK)

    def score(self, batch: Batch) -> Tensor:
        assert batch.head is not None
        return embedding_relevance(self._targets, batch.head, batch.residual, batch.input_P, batch.row_P, batch.n_rows)
