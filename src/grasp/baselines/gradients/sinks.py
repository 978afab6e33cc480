"""Consumers of gradient factors: all uses of a block together, or whole matrices a few rows at a time.

Start with `MatrixSink`.

Shape letters: B examples, b a few of them, X left width, Y right width, K projected width.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import Tensor

from grasp.baselines.gradients.factors import materialise_uses, select_examples
from grasp.models.gradient_sums import BLOCK_ELEMENTS
from grasp.models.gradients import GradientFactors, PerExample

TakeMatrix = Callable[[int, Tensor, slice], None]
TakeUses = Callable[[int, list[GradientFactors], slice], None]


class UseSink:
    """Collects all uses of a block; a tied weight has several.

    Calls `take` with the block, its uses and their rows in the batch: immediately if the block has one use, else in
    `finish`.
    """

    def __init__(self, engine: PerExample, wanted: Sequence[bool], take: TakeUses) -> None:
        self._calls, self._wanted, self._take = engine.calls, wanted, take
        self._pending: dict[int, list[tuple[GradientFactors, slice]]] = {}

    def __call__(self, number: int, use: GradientFactors, rows: slice) -> None:
        if not self._wanted[number]:
            return
        if self._calls[number] == 1:
            self._take(number, [use], rows)
        else:
            self._pending.setdefault(number, []).append((use, rows))

    def finish(self) -> None:
        """Pass on pending uses, split at the boundaries of all uses so that each piece has every use."""
        for number, pending in self._pending.items():
            edges = sorted({edge for _, rows in pending for edge in (rows.start, rows.stop)})
            for begin, end in pairwise(edges):
                uses = [
                    select_examples(use, begin - rows.start, end - rows.start)
                    for use, rows in pending
                    if rows.start <= begin and end <= rows.stop
                ]
                self._take(number, uses, slice(begin, end))
        self._pending.clear()


class MatrixSink(UseSink):
    """Forms gradient matrices; calls `take` with the block, (b, X, Y) and their rows in the batch."""

    def __init__(self, engine: PerExample, wanted: Sequence[bool], take: TakeMatrix) -> None:
        self._blocks, self._matrix = engine.layers.blocks, take
        super().__init__(engine, wanted, self._form)

    def _form(self, number: int, uses: list[GradientFactors], rows: slice) -> None:
        block = self._blocks[number]
        step = max(1, BLOCK_ELEMENTS // block.size)
        for begin in range(0, rows.stop - rows.start, step):
            end = min(begin + step, rows.stop - rows.start)
            total = materialise_uses([select_examples(use, begin, end) for use in uses], block.left)
            self._matrix(number, total, slice(rows.start + begin, rows.start + end))


def all_blocks(engine: PerExample) -> list[bool]:
    """Return a mask that selects all blocks."""
    return [True] * len(engine.layers.blocks)
