"""Slow references in float64: trainings unrolled by autograd, and dense Hessians. Never imported by grasp."""

from dataclasses import replace

import numpy as np
import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from grasp.models.causal_lm import pad_rows
from grasp.targets import UnitTokens
from grasp.training.adamw import Labels
from grasp.training.metagradient import Target
from grasp.training.recipe import OptimizerRecipe
from tests.models.toy import InMemoryRows

VOCAB = 11
RECIPE = OptimizerRecipe(steps=5, batch_rows=3, learning_rate=3e-2, warmup_steps=2, clip_norm=None)


def tiny_model(*, tied=False, seed=0):
    """Return a GPT-2 of a few hundred parameters in float64, with weights large enough for curvature."""
    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=8,
        n_inner=6,
        n_layer=1,
        n_head=2,
        n_positions=16,
        tie_word_embeddings=tied,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(seed)
    model = GPT2LMHeadModel._from_config(config, attn_implementation="eager").double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def some_rows(n_rows=8, *, completion_only=False):
    """Return rows of 3 to 7 tokens; with `completion_only` their first part has no loss."""
    rng = np.random.default_rng(1)
    rows = [rng.integers(VOCAB, size=rng.integers(3, 8)).astype(np.int32) for _ in range(n_rows)]
    masks = [np.arange(len(row)) >= 1 + i % (len(row) - 1) for i, row in enumerate(rows)]
    return InMemoryRows.from_rows(rows, masks if completion_only else None)


def some_order(steps=5, n_rows=8):
    """Return an order with three rows per step, in which some rows are repeated."""
    return list(np.random.default_rng(2).integers(n_rows, size=(steps, 3)))


def some_targets():
    rng = np.random.default_rng(3)
    units = [UnitTokens(rng.integers(VOCAB, size=4 + k % 3).astype(np.int32), 1 + k % 3) for k in range(6)]
    return [Target("even", units[::2]), Target("odd", units[1::2])]


def margin_targets():
    """Return a target of margins between two and three answers, normalised in different ways."""
    (even, odd) = some_targets()
    a, b, c = even.units
    scaled = [replace(unit, scale=scale) for unit, scale in zip(odd.units, (0.5, 2.0, 1.5), strict=True)]
    return [Target("margin", [replace(a, others=(scaled[0], b), scale=2.0), replace(c, others=tuple(scaled[1:]))])]


def weighted_losses(model, values, rows, index_B, weight_B, labels=None):
    """Return the contribution of each row to the loss of a batch; `values` are the parameters by name."""
    parts = []
    masks = [None if rows.loss_mask is None else rows.rows(np.array([i])).loss_mask for i in index_B]
    ids = [rows.rows(np.array([i])).flat_ids for i in index_B]
    chosen = [np.arange(len(row)) >= 1 if mask is None else mask for row, mask in zip(ids, masks, strict=True)]
    labels = labels or sum(int(mask.sum()) for mask in chosen)
    for row, mask, weight in zip(ids, chosen, weight_B, strict=True):
        tokens = torch.from_numpy(row.astype(np.int64))
        logits = torch.func.functional_call(model, values, kwargs={"input_ids": tokens[None]}).logits[0]
        losses = F.cross_entropy(logits[:-1], tokens[1:], reduction="none")
        parts.append(weight * losses[torch.from_numpy(mask[1:])].sum() / labels)
    return torch.stack(parts)


def unit_utility(model, values, target):
    """Return minus the mean over units of their mean loss."""
    losses = []
    for unit in target.units:
        tokens = torch.from_numpy(unit.input_ids.astype(np.int64))
        logits = torch.func.functional_call(model, values, kwargs={"input_ids": tokens[None]}).logits[0]
        losses.append(F.cross_entropy(logits[unit.first - 1 : -1], tokens[unit.first :]))
    return -torch.stack(losses).mean()


def unrolled(model, recipe, rows, order, targets, extra=None):
    """Return the derivatives (K, B, T) of final utilities by row weights, with AdamW unrolled in one graph.

    Args:
        extra: a step and a row that is added to its batch with weight 0; its derivative (T,) is returned too.
    """
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    values = {name: value.detach().clone().requires_grad_() for name, value in trained.items()}
    start = dict(values)
    moments = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in values.items()}
    weights = [torch.ones(len(index_B), dtype=torch.float64, requires_grad=True) for index_B in order]
    added = torch.zeros((), dtype=torch.float64, requires_grad=True)
    b1, b2 = recipe.betas
    for step, index_B in enumerate(order):
        loss = weighted_losses(model, values, rows, index_B, weights[step]).sum()
        if extra is not None and step == extra[0]:
            lengths = rows.loss_mask is None and sum(np.diff(rows.offsets)[index_B] - 1)
            labels = lengths or sum(int(rows.rows(np.array([i])).loss_mask.sum()) for i in index_B)
            loss = loss + weighted_losses(model, values, rows, [extra[1]], [added], labels).sum()
        gradients = dict(zip(values, torch.autograd.grad(loss, list(values.values()), create_graph=True), strict=True))
        if recipe.clip_norm is not None:
            norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
            if recipe.clip_norm / (norm + 1e-6) < 1:
                gradients = {
                    name: gradient * (recipe.clip_norm / (norm + 1e-6)) for name, gradient in gradients.items()
                }
        rate = recipe.learning_rate_at(step)
        for name, gradient in gradients.items():
            m, v = moments[name]
            m, v = b1 * m + (1 - b1) * gradient, b2 * v + (1 - b2) * gradient**2
            moments[name] = m, v
            seen = v > 0  # the root has no derivative at 0
            r = torch.where(seen, torch.where(seen, v, 1.0) / (1 - b2 ** (step + 1)), 0.0)
            r = torch.where(seen, torch.where(seen, r, 1.0).sqrt(), 0.0)
            decay = recipe.weight_decay if values[name].ndim > 1 else 0.0
            values[name] = (1 - rate * decay) * values[name] - rate * m / (1 - b1 ** (step + 1)) / (r + recipe.epsilon)
    utilities = [unit_utility(model, values, target) for target in targets]
    leaves = [*weights, added]
    gradients_T = [torch.autograd.grad(utility, leaves, retain_graph=True, allow_unused=True) for utility in utilities]
    drawn_KBT = np.stack([np.stack([part.numpy() for part in gradients[:-1]]) for gradients in gradients_T], axis=2)
    extra_T = np.array([0.0 if gradients[-1] is None else float(gradients[-1]) for gradients in gradients_T])
    assert start.keys() == values.keys()
    return drawn_KBT, extra_T, np.array([float(utility.detach()) for utility in utilities])


def flat_losses(training, ids_BL, weight_BL):
    """Return a function of the flat vector of all parameters: the loss of each row."""
    sizes = [parameter.shape for parameter in training.parameters]

    def losses(flat_P):
        parts = torch.split(flat_P, [size.numel() for size in sizes])
        replaced = {name: part.view(size) for name, part, size in zip(training.names, parts, sizes, strict=True)}
        ids = torch.from_numpy(ids_BL)
        logits_BLV = torch.func.functional_call(training.model, replaced, kwargs={"input_ids": ids}).logits
        row_P, position_P = torch.from_numpy(weight_BL).nonzero(as_tuple=True)
        weight_P = torch.from_numpy(weight_BL)[row_P, position_P]
        labels = Labels(ids[row_P, position_P + 1], weight_P, row_P, len(ids_BL))
        return labels.row_losses(logits_BLV[row_P, position_P])

    return losses


def a_batch(lengths=(4, 6, 3)):
    """Return token ids and label weights of a batch whose padding is not zero."""
    rng = np.random.default_rng(4)
    ids, loss_mask = pad_rows([rng.integers(VOCAB, size=n).astype(np.int32) for n in lengths])
    ids_BL = np.where(loss_mask.numpy() | (np.arange(ids.shape[1]) == 0), ids.numpy(), rng.integers(VOCAB))
    weight_BL = np.zeros(ids_BL.shape)
    weight_BL[:, :-1] = loss_mask.numpy()[:, 1:]
    return ids_BL, weight_BL / weight_BL.sum()
