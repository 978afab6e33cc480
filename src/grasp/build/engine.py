"""`--engine ray`: workers on a Ray cluster run the reference model over rows, in the place of the calling process.

They get rows and give back features; the caller alone reads and writes files. It reads the corpus into its row store,
which is resumable, fingerprinted, and cut into the shards that are built; what is spread is the forward pass. Ray Data
would read the corpus in an order and in blocks of its own, to which the shards of a resumed build would have to be
matched again; reading costs a hundredth of the pass. Shards and features travel through Ray's object store, so nodes
need no common disk: only the model has to be where the settings say, on every node.

Results are those of one process, bit for bit on the same device with the same number of threads: shards are the same,
batches within a shard are the same, and moments are merged in the order of the rows.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

from grasp.build.modality import load_reference
from grasp.build.model_pass import ModelPass, Workers
from grasp.build.ray_cluster import JOBS_A_WORKER, Cluster, ClusterSpec, connected, enter
from grasp.kernels.kernel import Batch, CorpusMoments, Kernel, make_kernels
from grasp.models.forward_pass import Rows
from grasp.progress import Advance, ignore
from grasp.settings import BuildSettings, FeatureSettings, ModelSettings


class ModelActor:
    """A worker: the model, loaded when the first job comes, and the kernels of the moments it was given."""

    def __init__(self, directory: str, settings: ModelSettings, features: FeatureSettings) -> None:
        enter(directory)
        self._settings = settings
        self._features = features
        self._kernels: list[Kernel] | None = None

    def run(self, job: Callable[..., Any], rows: Rows, how: dict[str, Any]) -> Any:
        """See `RayWorkers.run`; kernels are what they are made of, the same in every call that has them."""
        if how.get("kernels") is not None:
            if self._kernels is None:
                self._kernels = self._made(*how["kernels"])
            how = how | {"kernels": self._kernels}
        return job(self._ready, rows, **how)

    def _made(self, units: Batch, moments: dict[str, Any]) -> list[Kernel]:
        model, corpus = self._ready.model, CorpusMoments(self._ready.model)
        kernels = make_kernels(self._features.kernels, model, self._features, corpus)
        corpus.load(moments)
        units = replace(units.to(model.device), head=model.head, sampled=self._ready.sampled)
        for kernel in kernels:
            kernel.prepare(units)
        return kernels

    @cached_property
    def _ready(self) -> ModelPass:
        return ModelPass.choose(load_reference(self._settings), self._features)


class RayWorkers(Workers):
    """The actors of one build."""

    def __init__(self, cluster: Cluster, settings: BuildSettings, units: Batch) -> None:
        self._cluster = cluster
        self._actors = cluster.actors(ModelActor, os.getcwd(), settings.model, settings.features)
        # before the kernels prepare, which write over the coordinates
        self._units = replace(units.to("cpu", copy=True), head=None, sampled=None)

    def run(
        self,
        job: Callable[..., Any],
        parts: Iterable[tuple[int, Rows]],
        advance: Advance = ignore,
        *,
        in_order: bool = False,
        **how: Any,
    ) -> Iterator[tuple[int, Any]]:
        """See Workers. In order, parts are numbered from 0; those that are done early wait, a few at most."""
        if how.get("kernels") is not None:
            how["kernels"] = self._units, how["kernels"][0].corpus.arrays()
        material = self._cluster.put(how)
        size: dict[int, tuple[int, int]] = {}  # rows and tokens of parts that are under way

        def counted() -> Iterator[tuple[int, Rows]]:
            for k, rows in parts:
                size[k] = len(rows), rows.n_tokens
                yield k, rows

        early: dict[int, Any] = {}
        due, most = 0, JOBS_A_WORKER * len(self._actors)
        for k, result in self._cluster.spread(
            self._actors,
            counted(),
            lambda actor, rows: actor.run.remote(job, rows, material),
            wait=lambda: len(early) >= most,
        ):
            advance(*size.pop(k))
            if not in_order:
                yield k, result
                continue
            early[k] = result
            while due in early:
                yield due, early.pop(due)
                due += 1


@contextmanager
def ray_workers(spec: ClusterSpec, settings: BuildSettings, units: Batch) -> Iterator[RayWorkers]:
    """Workers on the cluster of `spec`, for as long as the `with` block lasts."""
    with connected(spec) as cluster:
        yield RayWorkers(cluster, settings, units)
