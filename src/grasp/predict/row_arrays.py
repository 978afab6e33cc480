"""What prediction asks of an artifact: which targets, and columns of its row table."""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from grasp.artifact.reader import ArtifactReader
from grasp.errors import ProtocolError
from grasp.predict.labels import LabelColumn
from grasp.text import did_you_mean, several

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Blocks = Iterator[tuple[int, F32]]


def checked_targets(artifact: ArtifactReader, target: str | Sequence[str] | None) -> tuple[str, ...]:
    """The targets asked for, all of the artifact's if none were.

    Raises:
        ProtocolError: no target, one that the artifact lacks, or one twice.
    """
    chosen = tuple(artifact.targets) if target is None else several(target)
    unknown = [target for target in chosen if target not in artifact.targets]
    if unknown or not chosen:
        meant = did_you_mean(unknown[0], artifact.targets) if unknown else ""
        raise ProtocolError(f"target: got {list(chosen)}{meant}, the artifact has {list(artifact.targets)}")
    if twice := sorted({target for target in chosen if chosen.count(target) > 1}):
        raise ProtocolError(f"target: got {', '.join(twice)} more than once; name each once")
    return chosen


def only_target(artifact: ArtifactReader, target: str | None) -> str:
    """One target: the one asked for, or the only one.

    Raises:
        ProtocolError: the artifact lacks it, or has several and none was named.
    """
    if target is None and len(artifact.targets) > 1:
        raise ProtocolError(f"target: got none, and the artifact has {', '.join(artifact.targets)}; name one")
    return checked_targets(artifact, target)[0]


def row_tokens(artifact: ArtifactReader) -> NDArray[np.int64]:
    """Tokens of every row, (N,)."""
    return np.concatenate(
        [np.asarray(batch.column("n_tokens"), dtype=np.int64) for batch in artifact.row_batches(["n_tokens"])]
    )


def row_documents(artifact: ArtifactReader) -> NDArray[np.int64]:
    """The document of every row as a number, in order of first appearance, (N,)."""
    names = pa.chunked_array([batch.column(0) for batch in artifact.row_batches(["doc_id"])])
    return np.asarray(names.combine_chunks().dictionary_encode().indices.to_numpy(), dtype=np.int64)


def label_column(artifact: ArtifactReader, name: str) -> LabelColumn:
    """One label of every row."""
    return LabelColumn.of_batches(name, (batch.column(0) for batch in artifact.row_batches([name])))
