"""Add targets to a finished artifact, from its stored features or by another pass. Start with `add_target`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from grasp.artifact.reader import ArtifactReader
from grasp.artifact.writer import ArtifactWriter, lock_artifact
from grasp.kernels.kernel import CorpusMoments, Kernel, kernel_class, make_kernels
from grasp.kernels.sketch import Sketch
from grasp.models.build_source import BuildSource
from grasp.models.forward_pass import Reference
from grasp.pipeline.inputs import InMemory, prepare_inputs
from grasp.pipeline.model_pass import Workers
from grasp.pipeline.pipeline import scored_shards
from grasp.pipeline.stored_inputs import unit_arrays, unit_table
from grasp.progress import Progress, Silent
from grasp.settings import FeatureSettings, TargetSettings

# From what the relevance of added targets was computed.
RelevanceSource = Literal["kept features", "pass", "there already"]


def add_target(
    out: Path, targets: TargetSettings, *, overrides: Mapping[str, Any] | None = None, progress: Progress | None = None
) -> RelevanceSource:
    """Add targets to the artifact `out`, and return the source of their relevance.

    Old units are unchanged. An interrupted call is resumed by the same call. A pass gives the same numbers as a joint
    build; relevance from stored features, which are float16, is within 2e-3 of its largest value.

    Args:
        overrides: settings of the user: custom code that may run, and the current paths of model and corpus.
    Raises:
        ArtifactError: model or corpus differ from those of the build, or the artifact has a target already.
        SettingsError: the artifact was built with custom code that `overrides` does not name.
    """
    progress = progress or Silent()
    ArtifactReader.open(out)  # before the lock, which would create the directory
    with lock_artifact(out):
        artifact = ArtifactReader.open(out)
        origin = BuildSource(artifact, overrides)
        origin.require_corpus_here("--corpus")
        settings = origin.settings.model_copy(update={"targets": targets, "keep_features": False})
        inputs = prepare_inputs(settings, out / "tokens", progress, in_memory=InMemory(origin.model))
        artifact.prove(corpus=inputs.store.fingerprint)
        kernels = load_kernels(artifact, inputs.model, inputs.settings.features)
        for kernel in kernels:
            kernel.prepare(inputs.units)
        extension = ArtifactWriter.extend(
            out,
            identity=inputs.identity,
            units=unit_table(inputs),
            arrays={kernel.array: kernel.spec(inputs.units) for kernel in kernels},
            dtype=settings.array_dtype,
        )
        if extension.complete:
            return "there already"
        from_features = artifact.keeps_features
        if not from_features:
            progress.note(
                f"{inputs.store.n_tokens:,} tokens on {inputs.model.device}; a build with --keep-features avoids this "
                "pass"
            )
        read_cached = (lambda k: [artifact.features(k)]) if from_features else None
        workers = Workers(inputs.model_pass)
        for k, shard in scored_shards(inputs, workers, kernels, extension.left, read_cached, progress):
            extension.write_shard(k, shard.arrays, None, {})
        added = "targets+" + "+".join(inputs.unit_set.targets)
        fingerprint = inputs.identity["fingerprints"]["targets"]
        moments = unit_arrays(inputs, kernels, progress)
        extension.finish(manifest={"fingerprints": {added: fingerprint}}, moments=moments)
        return "kept features" if from_features else "pass"


def load_kernels(artifact: ArtifactReader, model: Reference, features: FeatureSettings) -> list[Kernel]:
    """Return the kernels of an artifact without its sketches, with the stored moments."""
    corpus = CorpusMoments(model.vocab_size)
    names = [name for name in features.kernels if not issubclass(kernel_class(name), Sketch)]
    kernels = make_kernels(names, model, features, corpus)
    corpus.load(artifact.moments)
    return kernels
