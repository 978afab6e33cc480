"""What gradient methods open: examples of rows and units, checkpoints with their weights, groups of units that fit.

Shape letters: E units.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grasp.arrays import F64
from grasp.baselines.checkpoints import Checkpoint, checkpoints_of
from grasp.baselines.gradients.layers import choose_layers
from grasp.baselines.gradients.queries import Sizes, choose_dense, products, query_elements
from grasp.methods.contract import MethodInputs
from grasp.models.gradients import Example, LayerSet, PerExample
from grasp.seeds import stream


def row_examples(material: MethodInputs, start: int, stop: int) -> list[Example]:
    """Rows [start, stop); of a conversation the tokens that are trained on carry loss, of a text every next one."""
    rows = material.rows(start, stop)
    return [Example(rows.ids(i), labelled=rows.mask(i)) for i in range(len(rows))]


def sampled_rows(material: MethodInputs, count: int, seed: int, *purpose: str, prefix: int | None = None) -> list[int]:
    """Distinct rows, in corpus order, drawn from the first `prefix` rows; all of them where there are no more."""
    pool = material.n_rows if prefix is None else min(prefix, material.n_rows)
    if count >= pool:
        return list(range(pool))
    chosen = stream(seed, "baselines", *purpose).choice(pool, size=count, replace=False)
    return sorted(int(row) for row in chosen)


def examples_at(material: MethodInputs, rows: Sequence[int]) -> list[Example]:
    """Rows by number, read block by block."""
    wanted = set(rows)
    found = []
    for start, stop in material.blocks():
        inside = [row for row in range(start, stop) if row in wanted]
        if inside:
            shard = material.rows(start, stop)
            found += [Example(shard.ids(row - start), labelled=shard.mask(row - start)) for row in inside]
    return found


def unit_examples(material: MethodInputs) -> list[Example]:
    """Units in the order of the artifact; their completions carry loss."""
    return [Example(unit.input_ids, unit.first) for unit in material.unit_tokens]


def typical_tokens(material: MethodInputs) -> int:
    """Mean length of a row, by which costs are compared."""
    return max(2, round(int(material.artifact.manifest.detail("n_tokens")) / material.n_rows))


def chosen_checkpoints(material: MethodInputs, which: str) -> tuple[Checkpoint, ...]:
    """`all`, or the `last` by step."""
    return checkpoints_of(material) if which == "all" else checkpoints_of(material)[-1:]


def checkpoint_weights(checkpoints: Sequence[Checkpoint], how: str) -> tuple[F64, tuple[str, ...]]:
    """Weights that add up to 1, and what a reader must know of them."""
    rates = [one.learning_rate for one in checkpoints]
    if how == "equal" or len(checkpoints) == 1:
        return np.full(len(checkpoints), 1.0 / len(checkpoints)), ()
    known = [rate for rate in rates if rate is not None]
    if len(known) < len(rates) or sum(known) <= 0:
        note = "the learning rates of the checkpoints are not written down: they count alike"
        return np.full(len(checkpoints), 1.0 / len(checkpoints)), (note,)
    return np.asarray(known) / sum(known), ()


def open_engine(material: MethodInputs, checkpoint: Checkpoint, patterns: Sequence[str]) -> PerExample:
    """The engine over one checkpoint.

    Raises:
        SettingsError: a pattern matches nothing.
        ModelError: the checkpoint is of another architecture, or a layer has no per-example form.
    """
    model = checkpoint.load(material)
    return PerExample(model, choose_layers(model, patterns))


@dataclass(frozen=True, slots=True)
class Group:
    """Units that are scored in one pass over the rows."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class ExactPlan:
    """How inner products without projection are computed in bounded memory."""

    dense: tuple[bool, ...]  # of each block
    groups: tuple[Group, ...]


def exact_plan(
    layers: LayerSet,
    units: Sequence[Example],
    row_positions: int,
    memory_mb: int,
    *,
    dense: bool = False,
    copies: int = 1,
) -> ExactPlan:
    """Forms of the blocks and groups of units.

    Where the units do not fit in memory at once, every group is a pass of the model over the rows. A large block then
    is better held as factors, though its products cost more: the matrix of a head is as large as some models.

    Args:
        dense: whole gradients of every block are needed.
        copies: how often they are held at once.
    """
    blocks, sizes = layers.blocks, Sizes.from_counts(row_positions, units)

    def plan(chosen: Sequence[bool]) -> ExactPlan:
        per_unit = 4 * copies * query_elements(blocks, chosen, sizes)
        fit = max(1, (memory_mb << 20) // max(1, per_unit))
        return ExactPlan(tuple(chosen), tuple(Group(e, min(e + fit, len(units))) for e in range(0, len(units), fit)))

    def cost(plan: ExactPlan) -> int:
        passes = len(plan.groups)
        forms = zip(blocks, plan.dense, strict=True)
        own = sum(products(block, sizes, dense=whole, passes=passes) for block, whole in forms)
        return own + 2 * passes * row_positions * layers.total  # there and back

    cheapest = [dense or choose_dense(block, sizes) for block in blocks]
    plans = [plan(cheapest)]
    if not dense and len(plans[0].groups) > 1:
        for limit in sorted({0, *(block.size for block in blocks)}):
            small = ["vector" in block.kinds or block.size <= limit for block in blocks]
            plans.append(plan([whole and fits for whole, fits in zip(cheapest, small, strict=True)]))
    return min(plans, key=cost)
