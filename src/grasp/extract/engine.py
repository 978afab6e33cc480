"""Who runs the reference model over rows: this process, or actors on a Ray cluster (`--engine ray`).

They get rows and give back features; the caller alone reads and writes files.

The corpus is read and tokenised by the calling process into its row store, which is resumable, fingerprinted, and cut
into the shards that are built; what is spread is the forward pass, shard by shard. Ray Data would read the corpus in
an order and in blocks of its own, and the shards of a resumed build would have to be matched to them again; reading
costs a hundredth of the pass. Shards and features travel through Ray's object store, so nodes need no common disk:
only the model has to be where the settings say, on every node.

Results are those of the local engine, bit for bit on the same device with the same number of threads: shards are the
same, batches within a shard are the same, and moments are merged in the order of the rows.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from grasp.extract.backward import square_sums
from grasp.extract.cluster import JOBS_A_WORKER, Cluster, ClusterSpec, connected, enter
from grasp.extract.forward import (
    PositionKernels,
    PositionSums,
    ShardForward,
    UnitFeatures,
    forward_shard,
    position_sums,
)
from grasp.extract.pictures import load_reference
from grasp.extract.progress import Advance, ignore
from grasp.features.extract import Pass, Reference, Rows
from grasp.features.gradient_match import SampledGradients, SquareSums
from grasp.features.moments import PositionMoments
from grasp.settings import BuildSettings, FeatureSettings, ModelSettings


@dataclass(frozen=True, slots=True)
class InProcess:
    """The model of this process, one shard after the other.

    `seen` is filled where the parts of the moments are the shards: what the model gave is then used again.
    """

    model: Reference
    features: FeatureSettings
    seen: dict[int, list[Pass]] | None = None

    def position_sums(self, parts: Iterable[Rows], every: int, advance: Advance = ignore) -> Iterator[PositionSums]:
        """Sums for the token-level moments of each part, in the order of the parts."""
        for k, rows in enumerate(parts):
            keep = None if self.seen is None else self.seen.setdefault(k, [])
            yield position_sums(self.model, rows, self.features, every, advance, keep)

    def square_sums(self, parts: Iterable[Rows], advance: Advance = ignore) -> Iterator[SquareSums]:
        """Sums for the second moments of gradients of each part, in the order of the parts."""
        gradients = SampledGradients.choose(self.model, self.features)
        for rows in parts:
            yield square_sums(gradients, rows, self.features, advance)

    def forward(
        self,
        shards: Iterable[tuple[int, Rows]],
        kernel: PositionKernels | None,
        advance: Advance = ignore,
        *,
        keep_positions: bool = False,
    ) -> Iterator[tuple[int, ShardForward]]:
        """The forward half of each shard with its number."""
        for k, rows in shards:
            seen = [] if self.seen is None else self.seen.pop(k, [])
            shard = forward_shard(
                self.model, rows, self.features, kernel, keep_positions=keep_positions, advance=advance, seen=seen
            )
            yield k, shard


class ModelActor:
    """A worker: the model, loaded when the first job comes, and the position kernels of the moments it was given."""

    def __init__(self, directory: str, settings: ModelSettings, features: FeatureSettings) -> None:
        enter(directory)
        self._settings = settings
        self._features = features
        self._kernel: PositionKernels | None = None

    def position_sums(self, rows: Rows, every: int) -> PositionSums:
        """See InProcess."""
        return position_sums(self._model, rows, self._features, every)

    def square_sums(self, rows: Rows) -> SquareSums:
        """See InProcess."""
        return square_sums(SampledGradients.choose(self._model, self._features), rows, self._features)

    def forward(
        self, rows: Rows, kernel: tuple[UnitFeatures, PositionMoments] | None, keep_positions: bool
    ) -> ShardForward:
        """See InProcess; `kernel` is what the position kernels are made of, the same in every call that has it."""
        if kernel is not None and self._kernel is None:
            units, moments = kernel
            self._kernel = PositionKernels.prepare(units.to(self._model.device), moments, self._features, self._model)
        prepared = None if kernel is None else self._kernel
        return forward_shard(self._model, rows, self._features, prepared, keep_positions=keep_positions)

    @cached_property
    def _model(self) -> Reference:
        return load_reference(self._settings)


@dataclass(frozen=True, slots=True)
class RayWorkers:
    """The actors of one build."""

    cluster: Cluster
    actors: list[Any]
    units: UnitFeatures  # on the CPU

    def position_sums(self, parts: Iterable[Rows], every: int, advance: Advance = ignore) -> Iterator[PositionSums]:
        """In the order of the parts."""
        return self._in_order(parts, lambda actor, rows: actor.position_sums.remote(rows, every), advance)

    def square_sums(self, parts: Iterable[Rows], advance: Advance = ignore) -> Iterator[SquareSums]:
        """In the order of the parts."""
        return self._in_order(parts, lambda actor, rows: actor.square_sums.remote(rows), advance)

    def _in_order(self, parts: Iterable[Rows], call: Callable[[Any, Rows], Any], advance: Advance) -> Iterator[Any]:
        """What each part gives, in their order. Those that are done early wait for their turn, a few at most."""
        early: dict[int, Any] = {}
        due, most = 0, JOBS_A_WORKER * len(self.actors)
        size: Sizes = {}
        jobs = _counted(enumerate(parts), size)
        for k, sums in self.cluster.spread(self.actors, jobs, call, wait=lambda: len(early) >= most):
            early[k] = sums
            advance(*size.pop(k))
            while due in early:
                yield early.pop(due)
                due += 1

    def forward(
        self,
        shards: Iterable[tuple[int, Rows]],
        kernel: PositionKernels | None,
        advance: Advance = ignore,
        *,
        keep_positions: bool = False,
    ) -> Iterator[tuple[int, ShardForward]]:
        """As they are done."""
        size: Sizes = {}
        material = self.cluster.put(None if kernel is None else (self.units, kernel.moments))

        def call(actor: Any, rows: Rows) -> Any:
            return actor.forward.remote(rows, material, keep_positions)

        for k, shard in self.cluster.spread(self.actors, _counted(shards, size), call):
            advance(*size.pop(k))
            yield k, shard


Workers = InProcess | RayWorkers
Sizes = dict[int, tuple[int, int]]  # rows and tokens of jobs that are under way


def _counted(jobs: Iterable[tuple[int, Rows]], size: Sizes) -> Iterator[tuple[int, Rows]]:
    for k, rows in jobs:
        size[k] = len(rows), rows.n_tokens
        yield k, rows


@contextmanager
def connected_workers(
    spec: ClusterSpec | None, model: Reference, settings: BuildSettings, units: UnitFeatures, *, keep_passes: bool
) -> Iterator[Workers]:
    """Who runs the model, for as long as the `with` block lasts: this process, or workers on the cluster of `spec`.

    Args:
        keep_passes: what this process' model gives for the moments is used again for the shards.
    """
    if spec is None:
        yield InProcess(model, settings.features, {} if keep_passes else None)
        return
    with connected(spec) as cluster:
        actors = cluster.actors(ModelActor, os.getcwd(), settings.model, settings.features)
        yield RayWorkers(cluster, actors, units.to("cpu"))
