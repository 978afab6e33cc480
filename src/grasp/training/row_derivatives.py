"""Derivatives of the losses of many rows along directions u in weight space, at the current weights theta.

Start with `row_derivatives`. Methods:

    difference     (loss(theta + s u) - loss(theta - s u)) / 2 s: two forward passes per direction
    gradient       <gradient of the row, u>: one forward and backward pass for all directions, without storing gradients

A forward pass costs a third of a gradient, so the second method is cheaper for two or more directions.

Shape letters: N rows, T directions, B rows of a batch, L tokens, X x Y elements of a block of parameters.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from grasp.arrays import F64, I32, I64, Bool
from grasp.models.causal_lm import ReferenceModel, batches, pad_rows
from grasp.models.gradient_sums import BlockParameters, InnerProducts, run_over
from grasp.models.gradients import Example, PerExample, layers_of
from grasp.training.adamw import AdamWTraining
from grasp.training.hessian_products import displaced_weights

Method = Literal["difference", "gradient"]
FORWARD_COST = 1 / 3  # cost of a forward pass, in gradients


def cheaper_method(n_directions: int) -> tuple[Method, float]:
    """Return the cheaper method for a number of directions, and its cost in gradients per row."""
    by_differences = 2 * FORWARD_COST * n_directions
    return ("difference", by_differences) if by_differences < 1.0 else ("gradient", 1.0)


def row_derivatives(
    training: AdamWTraining,
    rows: Sequence[Example],
    directions: list[Sequence[Tensor]],
    method: Method,
    *,
    relative_step: float,
    batch_tokens: int,
) -> F64:
    """Return the derivative of the summed label loss of each row along directions, (N, T), nats.

    Args:
        training: model and weights, which are restored.
        rows: token ids and loss masks.
        directions: one tensor per parameter for each direction. The method `gradient` empties the list, to release the
            memory of the directions.
        method: see the module docstring.
        relative_step: step of a difference, relative to the norm of the weights.
        batch_tokens: tokens per forward pass, including padding.

    Raises:
        UnsupportedLayerError: the method is `gradient` and a parameter has no gradient per row.
    """
    if method == "gradient":
        return _by_gradients(training, rows, directions, batch_tokens)
    lengths = np.array([len(row.input_ids) for row in rows], dtype=np.int64)
    padded_batches = []
    for index_B in batches(lengths, batch_tokens):
        batch = [rows[int(i)] for i in index_B]
        loss_masks = [row.first if row.loss_mask is None else row.loss_mask for row in batch]
        padded_batches.append((index_B, *padded_labels([row.input_ids for row in batch], loss_masks)))
    value_NT = np.zeros((len(rows), len(directions)))
    for t, direction in enumerate(directions):
        for step in displaced_weights(training, direction, (relative_step, -relative_step)):
            for index_B, ids_BL, weight_BL in padded_batches:
                value_NT[index_B, t] += training.row_losses(ids_BL, weight_BL) / (2.0 * step)
    return value_NT


def padded_labels(rows: Sequence[I32], labels: Sequence[int | Bool | None]) -> tuple[I64, F64]:
    """Return token ids (B, L), padded on the right, and 1 at the positions whose next token is a label."""
    ids_BL, loss_mask_BL = pad_rows(rows, labels)
    weight_BL = np.zeros(tuple(ids_BL.shape))
    weight_BL[:, :-1] = loss_mask_BL[:, 1:]
    return ids_BL.numpy(), weight_BL


def _by_gradients(
    training: AdamWTraining, rows: Sequence[Example], directions: list[Sequence[Tensor]], batch_tokens: int
) -> F64:
    """Compute inner products of per-row gradients with the directions, and restore the modes of the model."""
    model = training.model
    requires_grad = [parameter.requires_grad for parameter in model.parameters()]
    modes = [module.training for module in model.modules()]
    reference = ReferenceModel(model, None, batch_tokens=batch_tokens)  # type: ignore[arg-type]  # no text is read
    try:
        engine = PerExample(reference, layers_of(reference, training.names))
        matrices = _direction_blocks(engine, training, directions)
        products = InnerProducts(engine, matrices, len(rows))
        run_over(engine, rows, [products])
    finally:
        for parameter, required in zip(model.parameters(), requires_grad, strict=True):
            parameter.requires_grad_(required)
        for module, mode in zip(model.modules(), modes, strict=True):
            module.training = mode
    labels_N = np.array([row.labels for row in rows], dtype=np.float64)
    return products.products * labels_N[:, None]


@torch.no_grad()
def _direction_blocks(engine: PerExample, training: AdamWTraining, directions: list[Sequence[Tensor]]) -> list[Tensor]:
    """Return directions in the layout of the engine, (T, X, Y) per block, and empty their list.

    Each direction is temporarily copied to the parameters, so that the engine's own code converts the layout. The
    result is allocated once, and directions are released as they are converted: of a large model, a second copy of all
    of them does not fit in memory.
    """
    model, n_directions = engine.model.model, len(directions)
    parameters = dict(model.named_parameters())
    layout = BlockParameters(model, engine.layers, engine.work)
    weights: dict[str, Tensor] = {}
    stacks: list[Tensor] = []
    for t in range(n_directions):
        named = dict(zip(training.names, directions.pop(0), strict=True))
        weights = weights or {name: parameters[name].clone() for name in named}
        for name, value in named.items():
            parameters[name].copy_(value)
        for number, block in enumerate(layout.read()):
            if t == 0:
                stacks.append(block.new_empty((n_directions, *block.shape)))
            stacks[number][t] = block
    for name, weight in weights.items():
        parameters[name].copy_(weight)
    return stacks
