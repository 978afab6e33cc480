"""Add targets to a finished artifact, from its stored features or by another pass. Start with `add_targets`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from grasp.artifact.manifest import ADDED_TARGETS
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.writer import ArtifactWriter, lock_artifact
from grasp.errors import SettingsError
from grasp.models.build_source import BuildSource
from grasp.pipeline.build_plan import local_artifact, split_overrides
from grasp.pipeline.inputs import InMemory, prepare_inputs
from grasp.pipeline.model_pass import Workers
from grasp.pipeline.pipeline import scored_shards
from grasp.pipeline.stored_inputs import load_kernels, unit_arrays, unit_table
from grasp.progress import Progress
from grasp.settings import TargetSettings
from grasp.targets.load import split_names
from grasp.yaml_files import validated

# From what the relevance of added targets was computed.
RelevanceSource = Literal["kept features", "pass", "there already"]


def add_targets(
    out: Path | str,
    targets: str | Sequence[str] | TargetSettings,
    *,
    settings: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> RelevanceSource:
    """Add targets to a finished artifact on this machine, and return from what their relevance was computed.

    Old units are unchanged. An interrupted call is resumed by the same call. A pass gives the same numbers as a joint
    build; relevance from stored features, which are float16, is within 2e-3 of its largest value.

    Args:
        out: directory of the artifact.
        targets: names of targets, or files of questions; or all settings of the targets.
        settings: settings of targets, e.g. `{"targets": {"seed": 3}}`; custom code that may run; and the current paths
            of model and corpus: `model.path`, `model.tokenizer`, `corpus.path`.
        progress: receives stages, notes and numbers of rows.
    Raises:
        SettingsError: other settings are given; they are fixed by the artifact. Or the artifact was built with custom
            code that `settings` does not name.
        ArtifactError: not an artifact, or it has a target already; model or corpus differ from those of the build.
    """
    nested = dict(settings or {})
    changes = nested.pop("targets", {})
    overrides, others = split_overrides(nested)
    if others or not isinstance(changes, dict) or "names" in changes:
        raise SettingsError(
            f"--add-target: got {', '.join(others) or 'targets'} as well; a target is added with the settings "
            "of the artifact, of which --set can change only those of targets, e.g. targets.max_length"
        )
    out = local_artifact(out, "--add-target")
    of_build = ArtifactReader.open(out).manifest.settings["targets"]  # before the lock, which would create `out`
    if not isinstance(targets, TargetSettings):
        names = split_names(targets) if isinstance(targets, str) else list(map(str, targets))
        targets = validated(TargetSettings, {**of_build, **changes, "names": names}, "targets")
    progress = progress or Progress()
    with lock_artifact(out):
        artifact = ArtifactReader.open(out)
        origin = BuildSource(artifact, overrides)
        origin.require_corpus_here("--corpus")
        config = origin.settings.model_copy(update={"targets": targets, "keep_features": False})
        inputs = prepare_inputs(config, out / "tokens", progress, in_memory=InMemory(origin.model))
        artifact.prove(corpus=inputs.store.fingerprint)
        kernels = load_kernels(artifact, inputs.model, inputs.settings.features)
        for kernel in kernels:
            kernel.prepare(inputs.units)
        extension = ArtifactWriter.extend(
            out,
            identity=inputs.identity,
            units=unit_table(inputs),
            arrays={kernel.array: kernel.spec(inputs.units) for kernel in kernels},
            dtype=config.array_dtype,
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
        names = [*artifact.manifest.details.get(ADDED_TARGETS, ()), *targets.names]
        manifest = {"fingerprints": {added: fingerprint}, "details": {ADDED_TARGETS: names}}
        extension.finish(manifest=manifest, moments=moments)
        return "kept features" if from_features else "pass"
