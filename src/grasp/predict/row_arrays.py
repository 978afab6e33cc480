"""What prediction reads: rows with arrays, by blocks of rows, and nothing of how they are stored."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from grasp.errors import ProtocolError
from grasp.predict.labels import LabelColumn
from grasp.text import several

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Blocks = Iterator[tuple[int, F32]]


class RowArrays(Protocol):
    """What prediction needs of an artifact; anything with these methods can be predicted from."""

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

    def array_rows(self, name: str, row_index: NDArray[np.integer[Any]]) -> F32:
        """Chosen rows of an array, in the order given."""

    def rows(self, row_index: NDArray[np.integer[Any]]) -> pa.Table:
        """Chosen rows of the row table, in the order given."""

    def row_batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """The row table from first row to last."""


def checked_targets(artifact: RowArrays, target: str | Sequence[str] | None) -> tuple[str, ...]:
    """The targets asked for, all of the artifact's if none were.

    Raises:
        ProtocolError: no target, one that the artifact lacks, or one twice.
    """
    chosen = tuple(artifact.targets) if target is None else several(target)
    unknown = [target for target in chosen if target not in artifact.targets]
    if unknown or not chosen:
        raise ProtocolError(f"target: got {list(chosen)}, the artifact has {list(artifact.targets)}")
    if twice := sorted({target for target in chosen if chosen.count(target) > 1}):
        raise ProtocolError(f"target: got {', '.join(twice)} more than once; name each once")
    return chosen


def only_target(artifact: RowArrays, target: str | None) -> str:
    """One target: the one asked for, or the only one.

    Raises:
        ProtocolError: the artifact lacks it, or has several and none was named.
    """
    if target is None and len(artifact.targets) > 1:
        raise ProtocolError(f"target: got none, and the artifact has {', '.join(artifact.targets)}; name one")
    return checked_targets(artifact, target)[0]


def row_tokens(artifact: RowArrays) -> NDArray[np.int64]:
    """Tokens of every row, (N,)."""
    return np.concatenate(
        [np.asarray(batch.column("n_tokens"), dtype=np.int64) for batch in artifact.row_batches(["n_tokens"])]
    )


def row_documents(artifact: RowArrays) -> NDArray[np.int64]:
    """The document of every row as a number, in order of first appearance, (N,)."""
    names = pa.chunked_array([batch.column(0) for batch in artifact.row_batches(["doc_id"])])
    return np.asarray(names.combine_chunks().dictionary_encode().indices.to_numpy(), dtype=np.int64)


def label_column(artifact: RowArrays, name: str) -> LabelColumn:
    """One label of every row."""
    return LabelColumn.of_batches(name, (batch.column(0) for batch in artifact.row_batches([name])))
