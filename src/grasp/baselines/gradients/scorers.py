"""From features or whole gradients to scores of a block of rows.

Shape letters: n rows of a block, E units, K projected width.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from grasp.arrays import F64
from grasp.baselines.checkpoints import Checkpoint
from grasp.baselines.gradients.features import refuse_non_finite
from grasp.baselines.gradients.projection import Form, choose_forms
from grasp.baselines.gradients.queries import Queries, Transform, exact_products
from grasp.baselines.gradients.session import Group, row_examples
from grasp.baselines.gradients.store import FeatureStore, ready_seconds
from grasp.baselines.stored import RowScorer
from grasp.baselines.work import WorkArea
from grasp.errors import ModelError
from grasp.methods.contract import Account, MethodInputs, Scores
from grasp.models.gradients import Block


class ProjectedScorer(RowScorer):
    """Inner products of stored features of rows with given vectors of units."""

    def __init__(
        self, store: FeatureStore, unit_EK: F64, account: Account, work: WorkArea, *, normalise: bool = False
    ) -> None:
        self._store, self._unit_EK, self._account, self._work = store, unit_EK, account, work
        self._normalise = normalise

    def score(self, start: int, stop: int) -> Scores:
        row_NK = np.asarray(self._store.rows(start, stop)[0], dtype=np.float64)
        if row_NK.ndim == 3:  # layers apart: side by side
            row_NK = row_NK.swapaxes(0, 1).reshape(stop - start, -1)
        if self._normalise:
            row_NK = over_norms(row_NK, "row", start)
        return row_NK @ self._unit_EK.T

    def account(self) -> Account:
        return replace(self._account, ready=ready_seconds(self._work))


class ExactScorer(RowScorer):
    """Inner products of whole gradients of rows with queries; units outside the group score 0 here."""

    def __init__(
        self,
        material: MethodInputs,
        queries: Queries,
        group: Group,
        account: Account,
        *,
        weight_E: F64 | None = None,
        normalise: bool = False,
        transform: Transform | None = None,
    ) -> None:
        self._material, self._queries, self._group, self._account = material, queries, group, account
        self._weight_E = np.ones(queries.n_units) if weight_E is None else weight_E
        self._normalise, self._transform = normalise, transform

    def score(self, start: int, stop: int) -> Scores:
        rows = row_examples(self._material, start, stop)
        product_NE, square_N = exact_products(self._queries, rows, norms=self._normalise, transform=self._transform)
        refuse_non_finite(product_NE, self._queries.engine.model.dtype)
        if self._normalise:
            product_NE /= norms(square_N, "row", start)[:, None]
        scores_NE = np.zeros((stop - start, self._material.n_units))
        scores_NE[:, self._group.first : self._group.last] = product_NE * self._weight_E
        return scores_NE

    def account(self) -> Account:
        return self._account


def projection_note(blocks: Sequence[Block], width: int, form: Form, tokens: int) -> str:
    """How gradients were projected, in words."""
    forms = choose_forms(blocks, width, tokens, form)
    dense = forms.count("dense")
    return f"projected to {width}: {dense} blocks by dense signs, {len(forms) - dense} two-sided"


def exact_note(groups: int) -> str:
    """That gradients were not projected, and what that took."""
    return "exact, not projected" + ("" if groups == 1 else f", in {groups} passes over the rows a checkpoint")


def checkpoint_note(checkpoints: Sequence[Checkpoint], weights: F64 | None = None) -> str:
    """Which checkpoints were added up, and what each counted for."""
    names = [one.path.name if one.step is None else f"step {one.step}" for one in checkpoints]
    if weights is not None and len(names) > 1:
        names = [f"{name} ({weight:.3g})" for name, weight in zip(names, weights, strict=True)]
    return "at " + ", ".join(names)


def over_norms(vectors_NK: F64, what: str, first: int = 0) -> F64:
    """Each vector over its norm.

    Raises:
        ModelError: a vector is zero or not finite; row or unit named.
    """
    return vectors_NK / norms(np.einsum("nk,nk->n", vectors_NK, vectors_NK), what, first)[:, None]


def norms(square_N: F64, what: str, first: int = 0) -> F64:
    """Roots of squared norms.

    Raises:
        ModelError: one is zero or not finite: a gradient has no direction; row or unit named.
    """
    bad = np.flatnonzero(~(np.isfinite(square_N) & (square_N > 0)))
    if bad.size:
        raise ModelError(
            f"{what} {first + bad[0]}: the squared norm of its gradient is {square_N[bad[0]]} ({bad.size} such), so it "
            "has no direction; use model.dtype bfloat16 or float32, other layers, or a form without norms"
        )
    return np.asarray(np.sqrt(square_N))
