"""Shared steps of gradient methods: examples of rows and units, weights of checkpoints, scores of blocks of rows.

Start with `open_engine`, then `feature_scorer` or `exact_scorer`.

Shape letters: n rows of a block, E units, K projected width.
"""

from collections.abc import Sequence

import numpy as np

from grasp.arrays import F64
from grasp.baselines.checkpoints import Checkpoint, training_checkpoints
from grasp.baselines.gradients.features import Featurizer, check_finite
from grasp.baselines.gradients.layers import choose_layers
from grasp.baselines.gradients.projection import choose_forms
from grasp.baselines.gradients.whole import Transform, UnitGradients, inner_products
from grasp.baselines.stored import RowScorer
from grasp.errors import ModelError, SettingsError
from grasp.methods.contract import Account, MethodInputs, Scores
from grasp.models.gradients import Block, Example, PerExample
from grasp.seeds import stream
from grasp.targets.margins import Answers


def sampled_rows(inputs: MethodInputs, count: int, seed: int, purpose: str, prefix: int | None = None) -> list[int]:
    """Sample distinct rows from the first `prefix` rows, in corpus order; all of them if `count` is larger."""
    pool = inputs.n_rows if prefix is None else min(prefix, inputs.n_rows)
    if count >= pool:
        return list(range(pool))
    chosen = stream(seed, "baselines", purpose).choice(pool, size=count, replace=False)
    return sorted(int(row) for row in chosen)


def examples_at(inputs: MethodInputs, rows: Sequence[int]) -> list[Example]:
    """Return rows by index as examples; the loss is on the trained tokens of a chat, on all tokens of a text."""
    inputs.refuse_pairs()
    stored = inputs.rows_at(np.asarray(rows, dtype=np.int64))
    return [Example(stored.ids(i), loss_mask=stored.mask(i)) for i in range(len(stored))]


def unit_examples(inputs: MethodInputs) -> list[Example]:
    """Return units as examples, in artifact order; the loss is on their completions.

    Raises:
        SettingsError: the utility of a unit is not the loss of one answer.
    """
    if not Answers.of(inputs.unit_tokens).are_units:
        raise SettingsError(
            f"{inputs.artifact.location}: the method compares gradients of losses, and the artifact has targets with a "
            "margin or weights; build one without them, or choose another method"
        )
    return [Example(unit.input_ids, unit.first) for unit in inputs.unit_tokens]


def mean_row_tokens(inputs: MethodInputs) -> int:
    """Return the mean length of a row, used to compare costs."""
    return max(2, round(int(inputs.artifact.manifest.details["n_tokens"]) / inputs.n_rows))


def select_checkpoints(inputs: MethodInputs, which: str) -> tuple[Checkpoint, ...]:
    """Return all checkpoints, or the last by step."""
    return training_checkpoints(inputs) if which == "all" else training_checkpoints(inputs)[-1:]


def checkpoint_note(checkpoints: Sequence[Checkpoint], weights: F64 | None = None) -> str:
    """Describe the checkpoints and their weights."""
    names = [checkpoint.name for checkpoint in checkpoints]
    if weights is not None and len(names) > 1:
        names = [f"{name} ({weight:.3g})" for name, weight in zip(names, weights, strict=True)]
    return "at " + ", ".join(names)


def open_engine(inputs: MethodInputs, checkpoint: Checkpoint, patterns: Sequence[str]) -> PerExample:
    """Load a checkpoint and return a per-example gradient engine for it.

    Raises:
        SettingsError: a pattern matches nothing.
        ModelError: the checkpoint has another architecture, or a layer has no per-example gradient.
    """
    model = checkpoint.load(inputs)
    return PerExample(model, choose_layers(model, patterns))


def feature_scorer(
    inputs: MethodInputs, featurizer: Featurizer, unit_EK: F64, account: Account, *, normalise: bool = False
) -> RowScorer:
    """Return a scorer by inner products of row features with vectors of units."""

    def score(start: int, stop: int) -> Scores:
        row_NK = featurizer.features(examples_at(inputs, range(start, stop)))[0].astype(np.float64)
        if row_NK.ndim == 3:  # one projection per layer: concatenate
            row_NK = row_NK.swapaxes(0, 1).reshape(stop - start, -1)
        if normalise:
            row_NK = divide_by_norms(row_NK, "row", start)
        return row_NK @ unit_EK.T

    return RowScorer(score, account)


def exact_scorer(
    inputs: MethodInputs,
    units: UnitGradients,
    group: slice,
    account: Account,
    *,
    weight_E: F64 | float = 1.0,
    normalise: bool = False,
    transform: Transform | None = None,
) -> RowScorer:
    """Return a scorer by inner products of whole gradients; units outside the group score 0."""

    def score(start: int, stop: int) -> Scores:
        rows = examples_at(inputs, range(start, stop))
        product_NE, square_N = inner_products(units, rows, norms=normalise, transform=transform)
        check_finite(product_NE, units.engine.model.dtype)
        if normalise:
            product_NE /= gradient_norms(square_N, "row", start)[:, None]
        scores_NE = np.zeros((stop - start, inputs.n_units))
        scores_NE[:, group] = product_NE * weight_E
        return scores_NE

    return RowScorer(score, account)


def projection_note(blocks: Sequence[Block], width: int, tokens: int) -> str:
    """Describe a projection of blocks; see `Projection`."""
    forms = choose_forms(blocks, width, tokens)
    dense = forms.count("dense")
    return f"projected to {width}: {dense} blocks by dense signs, {len(forms) - dense} two-sided"


def exact_note(groups: int) -> str:
    """Describe an exact computation and its number of passes."""
    return "exact, not projected" + ("" if groups == 1 else f", in {groups} passes over the rows per checkpoint")


def divide_by_norms(vectors_NK: F64, what: str, first: int = 0) -> F64:
    """Divide each vector by its norm.

    Raises:
        ModelError: a vector is zero or not finite; the message names the row or unit.
    """
    return vectors_NK / gradient_norms(np.einsum("nk,nk->n", vectors_NK, vectors_NK), what, first)[:, None]


def gradient_norms(square_N: F64, what: str, first: int) -> F64:
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
