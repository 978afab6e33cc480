"""Adding targets to a finished artifact: from its kept features, or by a pass for relevance only."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from grasp.artifact.reader import ArtifactReader
from grasp.artifact.writer import ArtifactWriter, lock_artifact
from grasp.build.inputs import identity, leak_arrays, prepare, unit_table
from grasp.build.moments import unspool_moments, unspool_position_moments
from grasp.build.pipeline import column_sums, relevance_specs
from grasp.build.provenance import BuildSource
from grasp.build.score_shard import PositionKernels, ShardForward, UnitFeatures, forward_shard
from grasp.kernels.pooled import PooledKernel
from grasp.models.forward_pass import Reference
from grasp.progress import Progress, Silent
from grasp.settings import FeatureSettings, TargetSettings

Source = Literal["kept features", "pass", "there already"]


def add_target(
    out: Path, targets: TargetSettings, *, own: Mapping[str, Any] | None = None, progress: Progress | None = None
) -> Source:
    """Add targets to the artifact `out`; returns where their relevance came from.

    The old units stay as they are. Killed at any moment, the same call goes on where it was. A pass gives what a
    joint build gives; token relevance from kept features, which are float16, is within 2e-3 of its largest value.

    Args:
        own: settings of the user, of which those are taken that decide which code is run, and where things are.
    Raises:
        ArtifactError: model or corpus are no longer those of the artifact; a target is there already.
        SettingsError: the artifact was built by code that `own` does not name as well.
    """
    progress = progress or Silent()
    ArtifactReader.open(out)  # before the lock, which would make the directory
    with lock_artifact(out):
        artifact = ArtifactReader.open(out)
        origin = BuildSource(artifact, own)
        origin.require_corpus_here("--corpus")
        settings = origin.settings.model_copy(update={"targets": targets})
        inputs = prepare(settings, out / "tokens", progress, model=origin.model)
        origin.prove(corpus=inputs.store.fingerprint)
        position_kernels, pooled = kernels(artifact, inputs.units, inputs.settings.features, inputs.model)
        extension = ArtifactWriter.extend(
            out,
            identity=identity(inputs),
            units=unit_table(inputs),
            arrays=relevance_specs(inputs, position_kernels, pooled),
            dtype=settings.array_dtype,
        )
        if extension.complete:
            return "there already"
        kept = artifact.keeps_features
        if not kept:
            progress.note(
                f"{inputs.store.n_tokens:,} tokens on {inputs.model.device}; a build with --keep-features spares "
                "targets that are added this pass"
            )
        left = extension.left
        share = len(left) / inputs.store.n_shards
        progress.stage("forward", rows=round(inputs.store.n_rows * share), tokens=round(inputs.store.n_tokens * share))
        for k in left:
            if kept:
                shard = ShardForward.unspool(artifact.features(k), inputs.model.vocab_size)
                columns: dict[str, NDArray[np.float32]] = {}
                if position_kernels is not None:
                    assert shard.positions is not None
                    batches = shard.positions.batches(len(shard.loss_N), inputs.model.device)
                    parts = [position_kernels.apply(batch) for batch in batches]
                    columns |= {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
                    if position_kernels.gradient is not None:
                        assert shard.gradients_NK is not None
                        columns["relevance_gradient"] = position_kernels.gradient.kept_relevance(shard.gradients_NK)
            else:
                rows = inputs.store.shard(k)
                shard = forward_shard(inputs.model, rows, inputs.settings.features, position_kernels)
                columns = shard.arrays
            arrays = pooled.relevance(shard.pooled) | columns
            extension.write_shard(k, arrays, None, column_sums(arrays))
            progress.advance(len(shard.loss_N), 0)
        added = "targets+" + "+".join(inputs.unit_set.targets)
        extension.finish(manifest={"fingerprints": {added: inputs.unit_set.fingerprint}}, moments=leak_arrays(inputs))
        return "kept features" if kept else "pass"


def kernels(
    artifact: ArtifactReader, units: UnitFeatures, features: FeatureSettings, model: Reference
) -> tuple[PositionKernels | None, PooledKernel]:
    """The artifact's own moments, folded into units; the product sketch is there already."""
    features = features.model_copy(update={"product_width": 0})
    position_kernels = None
    if "token" in features.kernels:
        position_kernels = PositionKernels.prepare(units, unspool_position_moments(artifact.moments), features, model)
    return position_kernels, PooledKernel.prepare(units.pooled, unspool_moments(artifact.moments, "pooled."), features)
