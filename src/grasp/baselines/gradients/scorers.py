"""Scores of blocks of rows from projected features or from whole gradients.

Start with `projected_scorer` or `exact_scorer`.

Shape letters: n rows of a block, E units, K projected width.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from grasp.arrays import F64
from grasp.baselines.checkpoints import Checkpoint
from grasp.baselines.gradients.features import check_finite
from grasp.baselines.gradients.projection import Form, choose_forms
from grasp.baselines.gradients.queries import Queries, Transform, exact_products
from grasp.baselines.gradients.session import row_examples
from grasp.baselines.gradients.store import FeatureStore, ready_seconds
from grasp.baselines.stored import RowScorer
from grasp.baselines.work import WorkArea
from grasp.errors import ModelError
from grasp.methods.contract import Account, MethodInputs, Scores
from grasp.models.gradients import Block


def projected_scorer(
    store: FeatureStore, unit_EK: F64, account: Account, work: WorkArea, *, normalise: bool = False
) -> RowScorer:
    """Return a scorer by inner products of stored row features with vectors of units."""

    def score(start: int, stop: int) -> Scores:
        row_NK = np.asarray(store.rows(start, stop)[0], dtype=np.float64)
        if row_NK.ndim == 3:  # one projection per layer: concatenate
            row_NK = row_NK.swapaxes(0, 1).reshape(stop - start, -1)
        if normalise:
            row_NK = divide_by_norms(row_NK, "row", start)
        return row_NK @ unit_EK.T

    return RowScorer(score, replace(account, ready=ready_seconds(work)))


def exact_scorer(
    inputs: MethodInputs,
    queries: Queries,
    group: slice,
    account: Account,
    *,
    weight_E: F64 | float = 1.0,
    normalise: bool = False,
    transform: Transform | None = None,
) -> RowScorer:
    """Return a scorer by inner products of whole row gradients with queries; units outside the group score 0."""

    def score(start: int, stop: int) -> Scores:
        rows = row_examples(inputs, start, stop)
        product_NE, square_N = exact_products(queries, rows, norms=normalise, transform=transform)
        check_finite(product_NE, queries.engine.model.dtype)
        if normalise:
            product_NE /= gradient_norms(square_N, "row", start)[:, None]
        scores_NE = np.zeros((stop - start, inputs.n_units))
        scores_NE[:, group] = product_NE * weight_E
        return scores_NE

    return RowScorer(score, account)


def projection_note(blocks: Sequence[Block], width: int, form: Form, tokens: int) -> str:
    """Describe the projection."""
    forms = choose_forms(blocks, width, tokens, form)
    dense = forms.count("dense")
    return f"projected to {width}: {dense} blocks by dense signs, {len(forms) - dense} two-sided"


def exact_note(groups: int) -> str:
    """Describe an exact computation and its number of passes."""
    return "exact, not projected" + ("" if groups == 1 else f", in {groups} passes over the rows per checkpoint")


def checkpoint_note(checkpoints: Sequence[Checkpoint], weights: F64 | None = None) -> str:
    """Describe the checkpoints and their weights."""
    names = [
        checkpoint.path.name if checkpoint.step is None else f"step {checkpoint.step}" for checkpoint in checkpoints
    ]
    if weights is not None and len(names) > 1:
        names = [f"{name} ({weight:.3g})" for name, weight in zip(names, weights, strict=True)]
    return "at " + ", ".join(names)


def divide_by_norms(vectors_NK: F64, what: str, first: int = 0) -> F64:
    """Divide each vector by its norm.

    Raises:
        ModelError: a vector is zero or not finite; the message names the row or unit.
    """
    return vectors_NK / gradient_norms(np.einsum("nk,nk->n", vectors_NK, vectors_NK), what, first)[:, None]


def gradient_norms(square_N: F64, what: str, first: int = 0) -> F64:
    """Return the roots of squared norms.

    Raises:
        ModelError: a norm is zero or not finite, so that the gradient has no direction; the message names row or unit.
    """
    bad = np.flatnonzero(~(np.isfinite(square_N) & (square_N > 0)))
    if bad.size:
        raise ModelError(
            f"{what} {first + bad[0]}: the squared norm of its gradient is {square_N[bad[0]]} ({bad.size} such), so it "
            "cannot be normalised; use model.dtype bfloat16 or float32, other layers, or no normalisation"
        )
    return np.asarray(np.sqrt(square_N))
