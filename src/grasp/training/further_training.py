"""Train a model further on subsets of a corpus, each time from the same weights: by the loss of tokens, or by DPO.

The DPO loss of a preference pair with chosen answer c and rejected answer r is

    -log sigmoid(beta (m - m_ref)),    m = log p(c) - log p(r)

with m_ref the margin before training, and its mean over the pairs of a step is minimised. At the start m = m_ref, and
the gradient is -beta / 2 (grad log p(c) - grad log p(r)). Source: Rafailov et al. 2023, arXiv 2305.18290, eq. 7.
Start with `FurtherTraining`.

Shape letters: N rows, B rows of a step, S sequences (rows, or two sides of every pair), L tokens.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812
from transformers import PreTrainedModel

from grasp.arrays import F64, I64, Bool
from grasp.corpus.row_store import RowStore, TokenRows
from grasp.training.adamw import AdamWTraining
from grasp.training.fine_tuning_recipe import FineTuningRecipe
from grasp.training.row_derivatives import padded_labels
from grasp.training.row_order import relative_weights, row_order

BLOCK_ROWS = 16  # pairs whose margins before training are computed together


class FurtherTraining:
    """Trains a model further, from the weights that it has at first.

    Args:
        model: causal LM in float32 or float64; its parameters with `requires_grad` are trained, in place.
        recipe: optimizer and budget; epochs are over the rows of a subset.
        rows: the corpus; if its rows are preference pairs, the loss is that of DPO.
    Raises:
        ModelError: the model cannot be trained.
    """

    def __init__(self, model: PreTrainedModel, recipe: FineTuningRecipe, rows: RowStore) -> None:
        self._model, self._recipe, self._rows = model, recipe, rows
        training = AdamWTraining(model, recipe.optimizer(rows.n_rows))
        self._start = [parameter.detach().clone() for parameter in training.parameters]
        self._reference_N: F64 | None = None
        if rows.shard(0).split_N is not None:
            starts = range(0, rows.n_rows, BLOCK_ROWS)
            blocks = [np.arange(start, min(start + BLOCK_ROWS, rows.n_rows)) for start in starts]
            self._reference_N = np.concatenate([margins(training, rows.rows(block)) for block in blocks])

    def train(
        self, retained: Bool | F64 | None, seed: int, progress: Callable[[int], None] | None = None
    ) -> PreTrainedModel:
        """Train on a subset, and return the model, whose weights the next call overwrites.

        Args:
            retained: mask of the rows, or a weight per row; a row of weight 2 is seen twice as often. An epoch has as
                many rows as are retained.
            seed: seed of the order of the rows.
            progress: callback that receives every step.
        Raises:
            ModelError: a loss is not finite.
        """
        frequency_N = relative_weights(self._rows.n_rows, 1, retained)
        n_retained = int(np.count_nonzero(frequency_N))
        training = AdamWTraining(self._model, self._recipe.optimizer(n_retained))
        training.set_weights(self._start)
        training.zero_gradients()
        for step, index_B in enumerate(self._recipe.batches(row_order(frequency_N, seed=seed), n_retained)):
            rows = self._rows.rows(index_B)
            if self._reference_N is not None:
                loss = dpo_backward(training, rows, self._reference_N[index_B], self._recipe.beta)
            else:
                ids_BL, weight_BL = padded_rows(rows)
                loss = float(training.backward(ids_BL, weight_BL / max(weight_BL.sum(), 1.0)).sum())
            training.check_loss(loss)
            training.update()
            if progress is not None:
                progress(step + 1)
        return self._model


def padded_rows(rows: TokenRows) -> tuple[I64, F64]:
    """Return token ids (B, L), padded on the right, and 1 at the positions whose next token carries loss."""
    return padded_labels([rows.ids(i) for i in range(len(rows))], [rows.mask(i) for i in range(len(rows))])


def signed_labels(pairs: TokenRows) -> tuple[I64, F64]:
    """Return the sides of pairs with label weights 1 (chosen) and -1 (rejected), whose summed losses are -margins."""
    ids_SL, weight_SL = padded_rows(pairs.sides())
    return ids_SL, weight_SL * np.tile([1.0, -1.0], len(pairs))[:, None]


def margins(training: AdamWTraining, pairs: TokenRows) -> F64:
    """Return log p(chosen) - log p(rejected) of pairs at the current weights, (B,), nats."""
    loss_S = training.row_losses(*signed_labels(pairs))
    return np.asarray(-(loss_S[::2] + loss_S[1::2]))


def dpo_backward(training: AdamWTraining, pairs: TokenRows, reference_B: F64, beta: float) -> float:
    """Add the gradient of the mean DPO loss of pairs to the buffers, and return the loss.

    Args:
        training: model and gradient buffers.
        pairs: preference pairs.
        reference_B: margins of the pairs before training.
        beta: strength of the implicit constraint to the model before training.
    """
    ids_SL, weight_SL = signed_labels(pairs)
    n_pairs, micro_rows, total = len(pairs), training.recipe.micro_rows or len(pairs), 0.0
    reference = torch.from_numpy(reference_B).to(training.device)
    for start in range(0, n_pairs, micro_rows):
        sides = slice(2 * start, 2 * (start + micro_rows))
        with torch.enable_grad():
            logits_PV, labels = training.label_logits(ids_SL[sides], weight_SL[sides])
            loss_S = labels.row_losses(logits_PV)
            margin_B = -(loss_S[::2] + loss_S[1::2])
            gain_B = margin_B - reference[start : start + micro_rows]
            loss = -F.logsigmoid(beta * gain_B).sum() / n_pairs
            loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total
