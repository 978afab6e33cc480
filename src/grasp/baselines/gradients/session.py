"""Inputs of gradient methods: examples of rows and units, weights of checkpoints, groups of units that fit in memory.

Start with `open_engine` and `exact_plan`.

Shape letters: E units.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grasp.arrays import F64
from grasp.baselines.checkpoints import Checkpoint, training_checkpoints
from grasp.baselines.gradients.layers import choose_layers
from grasp.baselines.gradients.queries import Sizes, choose_dense, products, query_elements
from grasp.errors import SettingsError
from grasp.methods.contract import MethodInputs
from grasp.models.gradients import Example, LayerSet, PerExample
from grasp.seeds import stream
from grasp.targets.margins import Answers


def row_examples(inputs: MethodInputs, start: int, stop: int) -> list[Example]:
    """Return rows [start, stop) as examples; the loss is on the trained tokens of a chat, on all tokens of a text."""
    return examples_at(inputs, range(start, stop))


def sampled_rows(inputs: MethodInputs, count: int, seed: int, *purpose: str, prefix: int | None = None) -> list[int]:
    """Sample distinct rows from the first `prefix` rows, in corpus order; all of them if `count` is larger."""
    pool = inputs.n_rows if prefix is None else min(prefix, inputs.n_rows)
    if count >= pool:
        return list(range(pool))
    chosen = stream(seed, "baselines", *purpose).choice(pool, size=count, replace=False)
    return sorted(int(row) for row in chosen)


def examples_at(inputs: MethodInputs, rows: Sequence[int]) -> list[Example]:
    """Return rows by index as examples, see `row_examples`."""
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


def checkpoint_weights(checkpoints: Sequence[Checkpoint], scheme: str) -> tuple[F64, tuple[str, ...]]:
    """Return weights that sum to 1, and notes on them."""
    rates = [checkpoint.learning_rate for checkpoint in checkpoints]
    if scheme == "equal" or len(checkpoints) == 1:
        return np.full(len(checkpoints), 1.0 / len(checkpoints)), ()
    known = [rate for rate in rates if rate is not None]
    if len(known) < len(rates) or sum(known) <= 0:
        note = "the learning rates of the checkpoints are not recorded: equal weights"
        return np.full(len(checkpoints), 1.0 / len(checkpoints)), (note,)
    return np.asarray(known) / sum(known), ()


def open_engine(inputs: MethodInputs, checkpoint: Checkpoint, patterns: Sequence[str]) -> PerExample:
    """Load a checkpoint and return a per-example gradient engine for it.

    Raises:
        SettingsError: a pattern matches nothing.
        ModelError: the checkpoint has another architecture, or a layer has no per-example gradient.
    """
    model = checkpoint.load(inputs)
    return PerExample(model, choose_layers(model, patterns))


@dataclass(frozen=True, slots=True)
class ExactPlan:
    """Plan for exact inner products in bounded memory."""

    dense: tuple[bool, ...]  # per block
    groups: tuple[slice, ...]  # units that are scored in one pass over the rows


def exact_plan(
    layers: LayerSet,
    units: Sequence[Example],
    row_positions: int,
    memory_mb: int,
    *,
    dense: bool = False,
    copies: int = 1,
) -> ExactPlan:
    """Choose the form of each block and the groups of units, by total cost.

    If the units do not fit in memory at once, each group takes a pass of the model over the rows. Storing a large block
    as factors can then be cheaper, although its products cost more: the matrix of a head is as large as some models.

    Args:
        dense: require whole gradients of every block.
        copies: number of copies of the gradients in memory at once.
    """
    blocks, sizes = layers.blocks, Sizes.from_counts(row_positions, units)

    def plan(chosen: Sequence[bool]) -> ExactPlan:
        per_unit = 4 * copies * query_elements(blocks, chosen, sizes)
        fit = max(1, (memory_mb << 20) // max(1, per_unit))
        return ExactPlan(tuple(chosen), tuple(slice(e, min(e + fit, len(units))) for e in range(0, len(units), fit)))

    def cost(plan: ExactPlan) -> int:
        passes = len(plan.groups)
        forms = zip(blocks, plan.dense, strict=True)
        product_cost = sum(products(block, sizes, dense=whole, passes=passes) for block, whole in forms)
        return product_cost + 2 * passes * row_positions * layers.total  # forward and backward pass

    cheapest = [dense or choose_dense(block, sizes) for block in blocks]
    plans = [plan(cheapest)]
    if not dense and len(plans[0].groups) > 1:
        for limit in sorted({0, *(block.size for block in blocks)}):
            small = ["vector" in block.kinds or block.size <= limit for block in blocks]
            plans.append(plan([whole and fits for whole, fits in zip(cheapest, small, strict=True)]))
    return min(plans, key=cost)
