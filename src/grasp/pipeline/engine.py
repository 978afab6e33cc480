"""Workers on a Ray cluster that run the reference model, instead of the calling process (`--ray`).

Workers receive rows and return features; only the caller reads and writes files. It reads the corpus into its row
store, whose shards are the jobs, so that only the forward pass is distributed; reading costs a hundredth of the pass.
(Ray Data would read the corpus in its own order and blocks, which do not match the shards of a resumed build.) Shards
and features are transferred through Ray's object store, so nodes need no common disk: only the model must exist at the
path of the settings on every node.

Results are equal to those of one process, bit for bit on the same device with the same number of threads: shards and
batches within a shard are the same, and moments are merged in the order of the rows. Start with `ray_workers`.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

from grasp.corpus.row_store import TokenRows
from grasp.kernels.gradient import Gradient
from grasp.kernels.kernel import CorpusMoments, Kernel, make_kernels
from grasp.models.batch import Batch
from grasp.models.build_source import load_reference
from grasp.pipeline.model_pass import ModelPass, Workers
from grasp.pipeline.ray_cluster import JOBS_PER_WORKER, Cluster, ClusterSpec, connected, enter
from grasp.progress import Advance, ignore
from grasp.settings import BuildSettings, FeatureSettings, ModelSettings


class ModelActor:
    """A Ray actor with the model, loaded at the first job, and the prepared kernels."""

    def __init__(self, directory: str, settings: ModelSettings, features: FeatureSettings) -> None:
        enter(directory)
        self._settings = settings
        self._features = features
        self._kernels: list[Kernel] | None = None

    def run(self, job: Callable[..., Any], rows: TokenRows, options: dict[str, Any]) -> tuple[int, int, Any]:
        """Run a job, such as `model_pass.score_shard`, on rows; return their number, that of tokens, and the result.

        `options` are its further arguments. If they contain `kernels`, these are sent as the units and the moments,
        from which this actor prepares the kernels once.
        """
        if options.get("kernels") is not None:
            if self._kernels is None:
                model, corpus = self._model_pass.model, CorpusMoments(self._model_pass.model.vocab_size)
                kernels = make_kernels(self._features.kernels, model, self._features, corpus)
                units, moments = options["kernels"]
                corpus.load(moments)
                # units are copied without the model
                units = replace(units.to(model.device), head=model.head, sampled=self._model_pass.sampled)
                for kernel in kernels:
                    kernel.prepare(units)
                self._kernels = kernels
            options = options | {"kernels": self._kernels}
        return len(rows), rows.n_tokens, job(self._model_pass, rows, **options)

    @cached_property
    def _model_pass(self) -> ModelPass:
        return ModelPass.choose(load_reference(self._settings), self._features)


class RayWorkers(Workers):
    """The actors of one build."""

    def __init__(self, cluster: Cluster, settings: BuildSettings, units: Batch) -> None:
        self._cluster = cluster
        self._actors = cluster.actors(ModelActor, os.getcwd(), settings.model, settings.features)
        self._units = replace(units.to("cpu"), head=None, sampled=None, unit_gradients=None)

    def run(
        self,
        job: Callable[..., Any],
        chunks: Iterable[tuple[int, TokenRows]],
        advance: Advance = ignore,
        *,
        in_order: bool = False,
        **options: Any,
    ) -> Iterator[tuple[int, Any]]:
        """See `Workers.run`. With `in_order`, chunks are numbered from 0, and a few early results are buffered."""
        if options.get("kernels") is not None:
            coordinates = [kernel.unit_EK.cpu() for kernel in options["kernels"] if isinstance(kernel, Gradient)]
            units = replace(self._units, gradient_BK=coordinates[0] if coordinates else None)
            options["kernels"] = units, options["kernels"][0].corpus.arrays()
        options_ref = self._cluster.put(options)
        early_results: dict[int, Any] = {}
        next_chunk, max_early = 0, JOBS_PER_WORKER * len(self._actors)
        for k, (n_rows, n_tokens, result) in self._cluster.distribute(
            self._actors,
            chunks,
            lambda actor, rows: actor.run.remote(job, rows, options_ref),
            wait=lambda: len(early_results) >= max_early,
        ):
            advance(n_rows, n_tokens)
            if not in_order:
                yield k, result
                continue
            early_results[k] = result
            while next_chunk in early_results:
                yield next_chunk, early_results.pop(next_chunk)
                next_chunk += 1


@contextmanager
def ray_workers(spec: ClusterSpec, settings: BuildSettings, units: Batch) -> Iterator[RayWorkers]:
    """Yield workers on the cluster of `spec`; they are released at the end of the `with` block."""
    with connected(spec) as cluster:
        yield RayWorkers(cluster, settings, units)
