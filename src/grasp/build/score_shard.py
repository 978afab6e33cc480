"""What the model does in the two loops of a build: observe a part of the sample, and score a shard of rows.

Shape letters: N rows of the shard, B rows of a batch, C columns of an array.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grasp.arrays import F32
from grasp.artifact.manifest import FeatureSpool
from grasp.build.model_pass import ModelPass, batch_arrays, read_batches
from grasp.kernels.kernel import CorpusMoments, Kernel, make_kernels
from grasp.models.forward_pass import Rows
from grasp.progress import Advance, ignore

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class ScoredShard:
    """The numbers of a shard, in order of row.

    Attributes:
        arrays: of every kernel, (N, C), by the name of its array.
        features: the batches as an artifact keeps them; None: they are not kept.
    """

    loss_N: F32
    arrays: dict[str, F32]
    features: Arrays | None = None


class PassedBatches:
    """Batches of loop 1 on disk, so that loop 2 need not run the model again. Memory holds one batch at a time.

    Args:
        ends: number of batches up to the end of each shard; None: loop 1 is to be run.
    """

    def __init__(self, directory: Path, ends: Sequence[int] | None = None) -> None:
        self._spool = FeatureSpool(directory)
        self._n_batches = 0
        self.ends = list(ends or ())

    def write(self, batch: Arrays) -> None:
        """Write the next batch of the shard."""
        self._spool.write(self._n_batches, batch)
        self._n_batches += 1

    def end_shard(self) -> None:
        """Note that the batches of the next shard follow."""
        self.ends.append(self._n_batches)

    def read(self, k: int) -> Iterator[Arrays]:
        """Yield the batches of shard k."""
        for number in range(self.ends[k - 1] if k else 0, self.ends[k]):
            yield self._spool.read(number)


def observe_part(
    ready: ModelPass,
    rows: Rows,
    *,
    states_every: int,
    keep: Callable[[Arrays], None] | None = None,
    advance: Advance = ignore,
) -> CorpusMoments:
    """Pass a part of the sample through the model, and return the moments of all kernels.

    Args:
        states_every: the hidden state of one in so many positions is kept.
        keep: receives each batch as arrays, from which `score_shard` scores these rows without the model.
    """
    corpus = CorpusMoments(ready.model, states_every)
    kernels = make_kernels(ready.settings.kernels, ready.model, ready.settings, corpus)
    for index, batch in ready.batches(rows):
        corpus.observe_loss(batch)
        for kernel in kernels:
            kernel.observe(batch)
        if keep is not None:
            keep(batch_arrays(0, index, batch))
        advance(len(index), rows.tokens_of(index))
    return corpus


def score_shard(
    ready: ModelPass,
    rows: Rows,
    *,
    kernels: Sequence[Kernel],
    keep_features: bool = False,
    passed: Iterable[Arrays] | None = None,
    advance: Advance = ignore,
) -> ScoredShard:
    """Pass the rows of a shard through the model, and score each batch by every kernel.

    Args:
        keep_features: also return the batches as an artifact keeps them.
        passed: batches of these rows from `batch_arrays`; the model is not run again.
    """
    loss_N = np.empty(len(rows), dtype=np.float32)
    arrays: dict[str, F32] = {}
    features: Arrays = {}
    batches = ready.batches(rows)
    if passed is not None:
        vocab_size = ready.model.vocab_size
        batches = chain.from_iterable(read_batches(arrays, ready, vocab_size) for arrays in passed)
    for k, (index, batch) in enumerate(batches):
        loss_N[index] = batch.loss_B.cpu().numpy()
        for kernel in kernels:
            part_BC = kernel.score(batch).cpu().numpy()
            if kernel.array not in arrays:
                arrays[kernel.array] = np.empty((len(rows), part_BC.shape[1]), dtype=np.float32)
            arrays[kernel.array][index] = part_BC
        if keep_features:
            features |= batch_arrays(k, index, batch, half=True)
        advance(len(index), rows.tokens_of(index))
    return ScoredShard(loss_N, arrays, features or None)


class Workers:
    """Who runs jobs of the model over parts of the corpus: this process; see also `engine.RayWorkers`."""

    def __init__(self, ready: ModelPass) -> None:
        self._ready = ready

    def run(
        self,
        job: Callable[..., Any],
        parts: Iterable[tuple[int, Rows]],
        advance: Advance = ignore,
        *,
        in_order: bool = False,
        **how: Any,
    ) -> Iterator[tuple[int, Any]]:
        """Yield what `job(ready, rows, **how)` gives for each numbered part, as parts are done or `in_order`."""
        for k, rows in parts:
            yield k, job(self._ready, rows, advance=advance, **how)
