"""What a scorer holds of an artifact: kernels of relevance and sketches, each ready to be summed over subsets.

A task's A(S) is the mean over its units, so one number a row and task is all that a sweep over tasks needs: the
matrix of all units is read once, not once for every block of subsets.
Shape letters: B subsets, N rows, n rows of a block, E units, T tasks, D sketch width.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from grasp.errors import ProtocolError
from grasp.predict.geometry import BlockSums, SketchSums, SketchTotals
from grasp.predict.source import F32, F64, Blocks, FeatureSource, RowSums, relevance_blocks
from grasp.predict.standardize import ComponentMoments, PairSums, RowMoments
from grasp.predict.weights import Weights, is_plain, squared

PAIR_ROWS = 8_192


@dataclass(frozen=True, slots=True)
class UnitSelection:
    """Units of the chosen targets: their columns in the artifact, target by target."""

    targets: tuple[str, ...]
    columns_E: NDArray[np.int64]
    counts_T: NDArray[np.int64]

    @classmethod
    def of(cls, source: FeatureSource, targets: Sequence[str]) -> Self:
        """All units of the targets.

        Raises:
            ProtocolError: a target without units: nothing can be predicted for it.
        """
        columns = [source.unit_columns(target) for target in targets]
        empty = [target for target, part in zip(targets, columns, strict=True) if not len(part)]
        if empty:
            raise ProtocolError(f"targets: {', '.join(empty)}: has no units, expected one at least; leave it out")
        return cls(tuple(targets), np.concatenate(columns), np.array([len(part) for part in columns]))

    def mean_per_task(self, values_nE: NDArray[Any]) -> F64:
        """(n, T) mean over the units of each task, float64."""
        starts = np.concatenate([[0], np.cumsum(self.counts_T)[:-1]])
        sums_nT = np.add.reduceat(np.asarray(values_nE, dtype=np.float64), starts, axis=1)
        return np.asarray(sums_nT / self.counts_T)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One relevance kernel at the level of tasks or of units: C columns."""

    rows: RowMoments  # over the corpus
    held: RowSums

    @classmethod
    def of_units(cls, source: FeatureSource, kernel: str, units: UnitSelection, negative: float) -> Self:
        """Every unit a column; one pass for the moments, and one to hold the matrix where it fits.

        Args:
            negative: what negative relevance is multiplied by.
        """

        def blocks() -> Blocks:
            return relevance_blocks(source, kernel, units.columns_E, negative)

        rows = merged(RowMoments.of(block) for _, block in blocks())
        return cls(rows, RowSums(blocks, source.n_rows, len(units.columns_E)))

    @classmethod
    def of_tasks(
        cls, source: FeatureSource, kernel: str, units: UnitSelection, negative: float, std: ComponentMoments | None
    ) -> Self:
        """Every task a column, the mean over its units; one pass, always held: 4 bytes a row and task.

        Args:
            negative: what negative relevance is multiplied by, unit by unit.
            std: each unit is divided by its standard deviation first; one that does not vary counts for nothing.
        """
        divisor_E = 1.0 if std is None else np.where(std.varies_E, std.std_E, np.inf)
        task_NT = np.empty((source.n_rows, len(units.targets)), dtype=np.float32)

        def reduce() -> Iterator[RowMoments]:
            for start, block in relevance_blocks(source, kernel, units.columns_E, negative):
                part_nT = units.mean_per_task(block / divisor_E)
                task_NT[start : start + len(block)] = part_nT
                yield RowMoments.of(part_nT)

        return cls(merged(reduce()), RowSums.over(task_NT))


@dataclass(frozen=True, slots=True)
class Sketch:
    """One sketch of every row, with ||phi||^2 beside it."""

    totals: SketchTotals
    norms: RowMoments  # of ||phi||^2 over the corpus
    held: RowSums  # of the sketch, and of ||phi||^2 as the last column
    read: Callable[[int], Blocks]

    @classmethod
    def of(cls, source: FeatureSource, half: str) -> Self:
        """Read the sketch once for its totals, and once more to hold it where it fits."""

        def blocks() -> Blocks:
            return _with_norms(source.array_blocks(f"{half}_sketch"))

        parts = [(block.sum(axis=0, dtype=np.float64), RowMoments.of(block[:, -1:])) for _, block in blocks()]
        total_C = np.sum([total for total, _ in parts], axis=0)
        norms = merged(moments for _, moments in parts)
        totals = SketchTotals(total_C[:-1], float(total_C[-1]), norms.n_rows)
        held = RowSums(blocks, source.n_rows, len(total_C))
        return cls(totals, norms, held, lambda rows: source.array_blocks(f"{half}_sketch", block_rows=rows))

    def blocks(self, block_rows: int) -> Blocks:
        """The sketch in blocks of so many rows, from memory where it is held."""
        held_NC = self.held.held_NC
        if held_NC is None:
            yield from self.read(block_rows)
            return
        for start in range(0, len(held_NC), block_rows):
            yield start, held_NC[start : start + block_rows, :-1]

    def sums(self, weights: Weights) -> SketchSums:
        """Sums over B subsets."""
        both_BC = self.held.sums(weights)
        square_B = both_BC[:, -1] if is_plain(weights) else self.held.sums(squared(weights))[:, -1]
        return SketchSums(both_BC[:, :-1], both_BC[:, -1], square_B)


def relevance_sums(source: FeatureSource, kernel: str, units: UnitSelection, weights: Sequence[Weights]) -> list[F64]:
    """Sums of relevance as it is, whatever a protocol makes of it: (B, T) for each block of subsets; one pass.

    A task's relevance is the mean over its units.
    """
    sums = [BlockSums(one) for one in weights]
    out = [np.zeros((one.shape[0], len(units.targets))) for one in weights]
    for start, block in source.array_blocks(f"relevance_{kernel}", columns=units.columns_E):
        mean_nT = units.mean_per_task(block)
        for place, one in enumerate(sums):
            out[place] += one.product(start, mean_nT)
    return out


def pair_sums(sketches: Sequence[Sketch]) -> PairSums:
    """Sums over pairs of rows of one sketch, or of several side by side; one pass."""
    sums = PairSums.empty(np.concatenate([sketch.totals.mean_D for sketch in sketches]))
    for parts in zip(*(sketch.blocks(PAIR_ROWS) for sketch in sketches), strict=True):
        sums = sums.plus(np.concatenate([block for _, block in parts], axis=1))
    return sums


def merged(parts: Iterable[RowMoments]) -> RowMoments:
    """Moments of all blocks of rows together."""
    return functools.reduce(RowMoments.merge, parts)


def _with_norms(blocks: Blocks) -> Iterator[tuple[int, F32]]:
    for start, block in blocks:
        norm_n = np.einsum("nd,nd->n", block, block, dtype=np.float64)
        yield start, np.column_stack([block, norm_n]).astype(np.float32, copy=False)
