"""What prediction reads from an artifact: arrays by blocks of rows, and nothing of how they are stored."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from grasp.errors import ProtocolError
from grasp.predict.counted import counted
from grasp.predict.geometry import BlockSums
from grasp.predict.sweep import SliceSums, Sweep
from grasp.predict.weights import SliceShares, Weights

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Blocks = Iterator[tuple[int, F32]]

# Arrays up to this size are held in memory over all blocks of subsets; larger ones are read again for each.
HELD_BYTES = 256 << 20


class FeatureSource(Protocol):
    """The reading side of an artifact, as far as prediction needs it."""

    @property
    def n_rows(self) -> int: ...
    @property
    def targets(self) -> tuple[str, ...]: ...
    @property
    def array_names(self) -> tuple[str, ...]: ...
    @property
    def units(self) -> pa.Table:
        """Table with `unit_id` and `target`, in the order of the relevance columns."""

    @property
    def feature_settings(self) -> Mapping[str, Any]:
        """The settings.features of the build."""

    def unit_columns(self, target: str) -> NDArray[np.int64]: ...
    def array_blocks(
        self, name: str, *, columns: NDArray[np.int64] | None = None, block_rows: int | None = None
    ) -> Blocks:
        """(start row, (n, columns)) from first row to last, in blocks of the same rows for every array."""


class RowSums:
    """sum_i w_i x_i over the rows of arrays that are read block by block, held in memory where they fit.

    Held or not, the sums agree to 2e-6 of sum_i |w_i x_i|.
    """

    def __init__(self, blocks: Callable[[], Blocks], n_rows: int, width: int, *, held_NC: F32 | None = None) -> None:
        self._blocks = blocks
        self._shape = (n_rows, width)
        if held_NC is None and n_rows * width * 4 <= HELD_BYTES:
            held_NC = np.empty(self._shape, dtype=np.float32)
            for start, block in blocks():
                held_NC[start : start + len(block)] = block
        self.held_NC = held_NC  # the values themselves, where they are in memory
        self._sweep = None if held_NC is None else Sweep(held_NC)
        self._slices = SliceSums()

    @classmethod
    def over(cls, values_NC: F32) -> Self:
        """Sums over values that are in memory already."""
        return cls(lambda: iter([(0, values_NC)]), *values_NC.shape, held_NC=values_NC)

    def blocks(self) -> Blocks:
        """The values that are summed, by blocks of rows from first to last."""
        return self._blocks() if self.held_NC is None else iter([(0, self.held_NC)])

    def sums(self, weights: Weights) -> F64:
        """(B, C) for one block of subsets."""
        if isinstance(weights, SliceShares):
            return self._slices.of(weights, self.sums)
        if self._sweep is not None:
            return self._sweep.sums(weights)
        parts = BlockSums(weights)
        out_BC = np.zeros((weights.shape[0], self._shape[1]))
        for start, block in self._blocks():
            out_BC += parts.product(start, block)
        return out_BC


def relevance_blocks(source: FeatureSource, kernel: str, columns: NDArray[np.int64], negative: float = 1.0) -> Blocks:
    """Relevance by blocks of rows, (n, columns), as a protocol counts it."""
    for start, block in source.array_blocks(f"relevance_{kernel}", columns=columns):
        yield start, counted(block, negative)


def checked_targets(source: FeatureSource, targets: Sequence[str] | None, where: str = "targets") -> tuple[str, ...]:
    """The targets asked for, all of the artifact's if none were.

    Args:
        where: what a message names.
    Raises:
        ProtocolError: no target, one that the artifact lacks, or one twice.
    """
    chosen = tuple(source.targets if targets is None else targets)
    unknown = [target for target in chosen if target not in source.targets]
    if unknown or not chosen:
        raise ProtocolError(f"{where}: got {list(chosen)}, the artifact has {list(source.targets)}")
    if twice := sorted({target for target in chosen if chosen.count(target) > 1}):
        raise ProtocolError(f"{where}: got {', '.join(twice)} more than once; name each once")
    return chosen
