"""How useful is every row for every target? Kernels are counted, put on one scale and added up, once.

For a kernel m and a row i, a task's a_im is the mean over its units of the counted relevance.
Shape letters: N rows, n rows of a block, E units, T targets, C columns (either).
"""

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from grasp.arrays import F32, F64
from grasp.artifact.reader import ArtifactReader
from grasp.errors import ProtocolError
from grasp.predict.row_arrays import Blocks
from grasp.predict.row_sums import RowSums, block_rows

# A spread this small against the size of the numbers is rounding, not variance.
RELATIVE_ZERO = 1e-9
Floats = TypeVar("Floats", bound=np.floating[Any])


@dataclass(frozen=True, slots=True)
class ColumnSpread:
    """Mean and standard deviation of columns, over rows or over subsets, (E,)."""

    mean_E: F64
    std_E: F64

    @property
    def varies_E(self) -> NDArray[np.bool_]:  # noqa: N802 - a shape suffix
        """Where there is a variance worth the name; elsewhere a column is dropped."""
        return np.asarray(self.std_E > RELATIVE_ZERO * np.maximum(np.abs(self.mean_E), np.finfo(float).tiny))

    @property
    def inverse_E(self) -> F64:  # noqa: N802 - a shape suffix
        """1 / std; 0 where nothing varies."""
        return np.divide(1.0, self.std_E, out=np.zeros_like(self.std_E), where=self.varies_E)

    def z(self, value_BE: F64) -> F64:
        """(x - mean) / std; 0 where nothing varies. Source: eq:component-predictor."""
        return np.asarray((value_BE - self.mean_E) * self.inverse_E)


@dataclass(frozen=True, slots=True)
class RowMoments:
    """Count, mean and squares of the numbers of each row, or subset, block by block."""

    n_rows: int
    mean_E: F64
    scatter_E: F64  # sum of (x - mean)^2

    @classmethod
    def from_values(cls, values_NE: NDArray[Any]) -> Self:
        """Moments of one block of rows."""
        values_NE = np.asarray(values_NE, dtype=np.float64)
        mean_E = np.ones(len(values_NE)) @ values_NE / len(values_NE)  # a product is the fastest sum over rows
        apart_NE = values_NE - mean_E
        return cls(len(values_NE), mean_E, np.einsum("ne,ne->e", apart_NE, apart_NE))

    def merge(self, other: Self) -> Self:
        """Moments of both sets of rows (Chan's merge)."""
        n_rows = self.n_rows + other.n_rows
        shift_E = other.mean_E - self.mean_E
        scatter_E = self.scatter_E + other.scatter_E + shift_E**2 * (self.n_rows * other.n_rows / n_rows)
        return type(self)(n_rows, self.mean_E + shift_E * (other.n_rows / n_rows), scatter_E)

    @property
    def total_E(self) -> F64:  # noqa: N802 - a shape suffix
        """Sum over the corpus."""
        return np.asarray(self.mean_E * self.n_rows)

    @property
    def spread(self) -> ColumnSpread:
        """Mean and population standard deviation."""
        return ColumnSpread(self.mean_E, np.sqrt(self.scatter_E / self.n_rows))


def counted(relevance_NE: NDArray[Floats], negative: float) -> NDArray[Floats]:
    """Let negative relevance count less: it is multiplied by `negative`, between 0 and 1, since it predicts little.

    Source: ours; a sum over rows of eq:grasp-score counts both alike, which is negative = 1.
    """
    if negative == 1.0:
        return relevance_NE
    factor = relevance_NE.dtype.type(negative)
    less_NE = relevance_NE * factor if negative else factor  # 0 times infinity is no number
    return np.asarray(np.maximum(relevance_NE, less_NE))


@dataclass(frozen=True, slots=True)
class UnitSelection:
    """Units of the chosen targets: their columns in the artifact, target by target."""

    targets: tuple[str, ...]
    columns_E: NDArray[np.int64]
    counts_T: NDArray[np.int64]

    @classmethod
    def from_targets(cls, artifact: ArtifactReader, targets: Sequence[str]) -> Self:
        """All units of the targets.

        Raises:
            ProtocolError: a target without units: nothing can be predicted for it.
        """
        columns = [artifact.unit_columns(target) for target in targets]
        empty = [target for target, part in zip(targets, columns, strict=True) if not len(part)]
        if empty:
            raise ProtocolError(f"targets: {', '.join(empty)}: has no units, expected one at least; leave it out")
        return cls(tuple(targets), np.concatenate(columns), np.array([len(part) for part in columns]))

    def mean_per_task(self, values_nE: NDArray[Any], scale_E: F64 | float = 1.0) -> F64:
        """(n, T) mean over the units of each task of the values times a scale, float64."""
        share_E = scale_E * np.repeat(1.0 / self.counts_T, self.counts_T)
        if len(share_E) == len(self.counts_T):
            return np.asarray(values_nE * share_E)
        values_nE, mean_nT = np.asarray(values_nE, dtype=np.float64), np.empty((len(values_nE), len(self.counts_T)))
        for t, stop in enumerate(np.cumsum(self.counts_T)):
            task = slice(stop - self.counts_T[t], stop)
            np.matmul(values_nE[:, task], share_E[task], out=mean_nT[:, t])
        return mean_nT


@dataclass(frozen=True, slots=True)
class Kernel:
    """The relevance of one kernel, ready to be added up: a column for each task, or for each unit."""

    rows: RowMoments  # over the corpus
    held: RowSums

    @classmethod
    def for_units(cls, artifact: ArtifactReader, kernel: str, units: UnitSelection, negative: float) -> Self:
        """Every unit a column; one pass for the moments, and one to hold the matrix where it fits."""
        blocks = functools.partial(relevance_blocks, artifact, kernel, units.columns_E, negative)
        return cls(_moments(blocks()), RowSums(blocks, artifact.n_rows, len(units.columns_E)))

    @classmethod
    def for_tasks(
        cls, artifact: ArtifactReader, kernel: str, units: UnitSelection, negative: float, inverse_E: F64 | float = 1.0
    ) -> Self:
        """Every task a column; one pass, always held: 4 bytes a row and task.

        Args:
            inverse_E: what each unit is multiplied by before the mean over units.
        """
        task_NT = np.empty((artifact.n_rows, len(units.targets)), dtype=np.float32)

        blocks = relevance_blocks(artifact, kernel, units.columns_E, negative)
        reduced = ((start, units.mean_per_task(block, inverse_E)) for start, block in blocks)
        return cls(_moments(_written(task_NT, reduced)), RowSums.over(task_NT))


def effects(
    kernels: Mapping[str, Kernel], slopes: Mapping[str, F64], held_NC: F32 | None
) -> tuple[RowSums, ColumnSpread]:
    """The effect of every row: sum_m slope_m a_m, brought to mean 0 and standard deviation 1 over the rows.

    The order matters. Each unit's relevance is counted first (negative relevance less), then averaged over the units of
    a task. Then each kernel is divided by its spread over the rows (that is in its slope), kernels are added, and the
    sum is divided by its own spread. That is known only when all rows were added.

    Returns:
        The effects, and the mean and standard deviation that were taken out.

    Args:
        held_NC: where the result goes; it may be what the first kernel holds, which is lost then. None: the result is
            made anew whenever it is summed, unless it is small.
    """

    def added() -> Iterator[tuple[int, F64]]:
        readers = [kernels[name].held.blocks() for name in slopes]
        for parts in zip(*readers, strict=True):
            start = parts[0][0]
            terms = (block * slope_C for (_, block), slope_C in zip(parts, slopes.values(), strict=True))
            yield start, functools.reduce(operator.iadd, terms)

    def standardised() -> Blocks:
        for start, block in added():
            yield start, ((block - spread.mean_E) * inverse_C).astype(np.float32)

    spread = _moments(added() if held_NC is None else _written(held_NC, added())).spread
    inverse_C = spread.inverse_E
    if held_NC is None:
        first = next(iter(kernels.values()))
        return RowSums(standardised, first.rows.n_rows, first.held.width), spread
    sums = RowSums.over(held_NC)
    for _, block in sums.blocks():
        block[:] = (block - spread.mean_E) * inverse_C
    return sums, spread


def relevance_blocks(
    artifact: ArtifactReader, kernel: str, columns: NDArray[np.int64], negative: float = 1.0
) -> Blocks:
    """Relevance by blocks of rows, (n, columns), as a protocol counts it."""
    rows = block_rows(len(columns))
    for start, block in artifact.array_blocks(f"relevance_{kernel}", columns=columns, block_rows=rows):
        yield start, counted(block, negative)


def _written(out_NC: NDArray[np.float32], blocks: Iterable[tuple[int, F64]]) -> Iterator[tuple[int, F64]]:
    """The same blocks, which are kept on their way."""
    for start, block in blocks:
        out_NC[start : start + len(block)] = block
        yield start, block


def _moments(blocks: Iterable[tuple[int, NDArray[Any]]]) -> RowMoments:
    return functools.reduce(RowMoments.merge, (RowMoments.from_values(block) for _, block in blocks))
