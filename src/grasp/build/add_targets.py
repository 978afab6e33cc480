"""Adding targets to a finished artifact: from its kept features, or by a pass for relevance only."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from grasp.artifact.reader import ArtifactReader
from grasp.artifact.writer import ArtifactWriter, lock_artifact
from grasp.build.inputs import leak_arrays, prepare, unit_table
from grasp.build.model_pass import Workers
from grasp.build.pipeline import column_sums, scored_shards
from grasp.build.provenance import BuildSource
from grasp.kernels.kernel import CorpusMoments, Kernel, kernel_class, make_kernels
from grasp.kernels.sketch import Sketch
from grasp.models.forward_pass import Reference
from grasp.progress import Progress, Silent
from grasp.settings import FeatureSettings, TargetSettings

Source = Literal["kept features", "pass", "there already"]


def add_target(
    out: Path, targets: TargetSettings, *, own: Mapping[str, Any] | None = None, progress: Progress | None = None
) -> Source:
    """Add targets to the artifact `out`; returns where their relevance came from.

    The old units stay as they are. Killed at any moment, the same call goes on where it was. A pass gives what a
    joint build gives; relevance from kept features, which are float16, is within 2e-3 of its largest value.

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
        settings = origin.settings.model_copy(update={"targets": targets, "keep_features": False})
        inputs = prepare(settings, out / "tokens", progress, model=origin.model)
        origin.prove(corpus=inputs.store.fingerprint)
        kernels = loaded_kernels(artifact, inputs.model, inputs.settings.features)
        for kernel in kernels:
            kernel.prepare(inputs.units)
        extension = ArtifactWriter.extend(
            out,
            identity=inputs.identity.record,
            units=unit_table(inputs),
            arrays={kernel.array: kernel.spec(inputs.units) for kernel in kernels},
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
        passed = (lambda k: [artifact.features(k)]) if kept else None
        workers = Workers(inputs.ready)
        for k, shard in scored_shards(inputs, workers, kernels, extension.left, passed, progress):
            extension.write_shard(k, shard.arrays, None, column_sums(shard.arrays))
        added = "targets+" + "+".join(inputs.unit_set.targets)
        fingerprint = inputs.identity.fingerprints["targets"]
        extension.finish(manifest={"fingerprints": {added: fingerprint}}, moments=leak_arrays(inputs))
        return "kept features" if kept else "pass"


def loaded_kernels(artifact: ArtifactReader, model: Reference, features: FeatureSettings) -> list[Kernel]:
    """Return the kernels of an artifact without its sketches, with the moments that it keeps."""
    corpus = CorpusMoments(model)
    names = [name for name in features.kernels if not issubclass(kernel_class(name), Sketch)]
    kernels = make_kernels(names, model, features, corpus)
    corpus.load(artifact.moments)
    return kernels
