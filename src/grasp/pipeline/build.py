"""The public functions `build`, `add_replay` and `add_targets`, which resolve settings and open the finished artifact.

Arguments become validated `BuildSettings`, and inputs that are passed as objects an `InMemory`, before anything else
is done. In the settings an object is represented by a fingerprint of its content instead of a path, so that a build is
resumed if it is called with equal objects. Then `build` calls what may also be called alone: `train_proxy` and
`warm_up` train a checkpoint, `build_artifact` reads one, and `replay_targets` adds to an artifact. Start with `build`.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from grasp.artifact.manifest import MANIFEST, RUN, SIGNED_MANIFEST, ReplayRecord
from grasp.artifact.reader import ArtifactReader
from grasp.corpus.sources import IN_MEMORY, Source, table_source
from grasp.errors import CorpusError, SettingsError, TargetError
from grasp.models.causal_lm import ReferenceModel
from grasp.models.checkpoint import dtype_name
from grasp.pipeline.add_replay import refuse_replay, replay_targets
from grasp.pipeline.add_targets import RelevanceSource, add_target
from grasp.pipeline.inputs import InMemory
from grasp.pipeline.pipeline import build_artifact, resolve_settings
from grasp.pipeline.proxy import CONTEXT, MODEL, train_proxy
from grasp.pipeline.ray_cluster import ClusterSpec
from grasp.pipeline.replay_plan import read_recipe
from grasp.pipeline.warm_up import warm_up as train_warm_up
from grasp.progress import Progress, Silent
from grasp.settings import (
    BuildSettings,
    ModelSettings,
    ReplaySettings,
    TargetSettings,
    build_settings,
    code_settings,
    form_of_loss,
    named_reader,
    without_foreign_code,
)
from grasp.store import remote
from grasp.targets.load import load_units, read_records, split_names
from grasp.targets.unit_records import units_from_records
from grasp.targets.units import Unit
from grasp.training.fine_tuning_recipe import FineTuningRecipe
from grasp.yaml_files import (
    get_setting,
    override_settings,
    plain_settings,
    pop_setting,
    read_yaml,
    require_flags,
    set_setting,
    set_settings,
    validated,
)

REQUIRED = {"--model": "model.path", "--corpus": "corpus.path", "--targets": "targets.names"}
PATH_SETTINGS = ("model.path", "model.tokenizer", "corpus.path")

# The setting of each argument of `build`, and of the same option of `grasp build`.
SETTINGS = {
    "model": "model.path",
    "tokenizer": "model.tokenizer",
    "dtype": "model.dtype",
    "corpus": "corpus.path",
    "split": "corpus.split",
    "text_column": "corpus.text_column",
    "id_column": "corpus.row_id_column",
    "max_length": "corpus.max_length",
    "limit": "corpus.limit",
    "train": "train",
    "loss": "corpus.form",
    "rule": "features.rule",
    "keep_features": "keep_features",
    "like": "like",
}


@dataclass(frozen=True, slots=True)
class OutputLocation:
    """Where a build writes: path or URL, URL (None: it stays on this machine), and the local directory of the build."""

    path: Path
    url: str | None
    directory: Path


def build(
    model: "str | Any" = None,
    corpus: "str | Any" = None,
    targets: "str | Any" = None,
    out: Path | str = "",
    *,
    tokenizer: "str | Any" = None,
    split: str | None = None,
    text_column: str | None = None,
    id_column: str | None = None,
    max_length: int | None = None,
    limit: int | None = None,
    train: str | None = None,
    loss: str | None = None,
    rule: str | None = None,
    dtype: str | None = None,
    keep_features: bool | None = None,
    like: str | Path | None = None,
    replay: bool = False,
    check: bool = False,
    warm_up: int | None = None,
    recipe: Path | str | Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | Path | str | None = None,
    resume: bool = False,
    untrained: bool = False,
    cluster: ClusterSpec | None = None,
    progress: Progress | None = None,
) -> ArtifactReader:
    """Run a model once over a corpus and write an artifact.

    An interrupted build is resumed by the same command.

    The model is a causal LM, unless settings choose a reader of other rows than texts (`grasp.readers`). Without
    --model, a small one is trained from scratch on the corpus, in minutes on a CPU.

    In Python a finished artifact is opened.

    Args:
        model: checkpoint that reads the corpus: a directory or a hub name. Default: for --train new, a small model that
            is trained on the corpus and stored in the artifact. In Python also a transformers model, with
            `tokenizer` or as a pair with it.
        corpus: texts, conversations or token ids: Parquet, JSONL, a directory of them, a `datasets` directory, a hub
            name, or a URL. In Python also a pandas DataFrame, a pyarrow Table, a `datasets.Dataset`.
        targets: tasks to improve (sciq, ...) or files of questions (exam.jsonl with lines
            {"question": ..., "answer": ...}, or prompt and completion), separated by commas. In Python also a list of
            them, or units: a list of dicts with prompt and completion (or question and answer), or a DataFrame.
        out: directory for the artifact, or a URL such as s3://bucket/art.
        tokenizer: the model's tokenizer. Default: the one in its directory. In Python a transformers tokenizer if the
            model is an object.
        split: split of a corpus that has several.
        text_column: column of the text, or of conversation turns. Default: text or messages.
        id_column: column of row names. Default: row_id or id; "" for none.
        max_length: maximum tokens of a row; longer documents are split. Default: the model's context, at most 2048.
        limit: read only the first N documents, for a quick look.
        train: what will be trained on the corpus: this model further (fine-tuning), or a new one from scratch.
            Default: as the checkpoint records, e.g. references of grasp retrain.
        loss: loss of the training: tokens, the cross-entropy of texts or answers; or dpo, for preference pairs with
            chosen and rejected answers. Default: tokens.
        rule: set of kernels: default, forward (without backward passes) or paper.
        dtype: dtype of the model: float32, bfloat16 or float16. Default: float32 on a CPU, else bfloat16.
        keep_features: store features, 2 to 6 kB per token, so that --add-target needs no other pass over the corpus.
        like: use the moments (means and variances of features) of this artifact, so that grasp merge can merge both.
        replay: also differentiate the training itself, for more accurate predictions of subsets at the price of several
            trainings; a finished artifact gets it later by --out and --replay alone.
        check: with --replay, also retrain once with changed weights of groups of rows, and compare the measured effect
            with the predicted one.
        warm_up: train the model for N steps on random rows first, and build from the result; a dozen steps can make
            predictions of fine-tuning on chats more accurate.
        recipe: settings of the training that --replay differentiates or --warm-up begins: a YAML or JSON file with
            the names of TrainingArguments, SFTConfig or Axolotl. Default: one epoch in batches of 16, at most 192
            steps; for a new model, a small one from scratch, 4 epochs in batches of 32, at most 320 steps.
        settings: further settings, nested, or a YAML file; arguments override them.
        resume: resume an interrupted build, with its settings.
        untrained: accept a model that predicts no better than chance.
        cluster: Ray workers that run the model.
    Raises:
        GraspError: invalid input; finished work is kept.
    """
    arguments = {
        "dtype": dtype,
        "split": split,
        "text_column": text_column,
        "id_column": id_column,
        "max_length": max_length,
        "limit": limit,
        "train": train,
        "loss": loss,
        "rule": rule,
        "keep_features": keep_features,
        "like": None if like is None else str(like),
    }
    raw_settings = set_settings(plain_settings(settings), argument_settings(arguments))
    set_settings(raw_settings, {"replay.check": 1 if check else None})
    output, progress = output_location(out), progress or Silent()
    names_data = corpus is not None or targets is not None or not raw_settings.keys().isdisjoint({"corpus", "targets"})
    names_model = model is not None or "model" in raw_settings
    # without an artifact either, `add_replay` reports that there is none
    adds_replay = (output.directory / MANIFEST).exists() or not (resume or names_model)
    if replay and not names_data and adds_replay:
        add_replay(out, recipe=recipe, settings=raw_settings, progress=progress)
        return ArtifactReader.open(output.path)
    parsed_recipe, replay_settings = split_replay_settings(
        raw_settings, recipe, use_replay=replay, warm_up=warm_up is not None
    )
    with _restore_modes(model[0] if isinstance(model, tuple | list) and model else model):
        in_memory = _put_inputs(raw_settings, model, tokenizer, corpus, targets)
        build_config, has_no_model = complete_settings(raw_settings, output, in_memory, resume=resume)
        if cluster is not None and in_memory.model is not None:
            raise SettingsError("model: got an object, but workers load it from disk; save it and pass its directory")
        if output.url is not None and remote.is_published(output.url, SIGNED_MANIFEST):
            if not resume:
                raise SettingsError(
                    f"--out: a complete artifact exists at {output.url}; choose another URL, or delete it"
                )
            progress.note(f"{output.url}: finished; nothing to do")
            return ArtifactReader.open(output.url)

        if has_no_model or warm_up is not None:
            load_units(build_config.targets, in_memory.units)  # report errors before the training
        shard_rows, seed = build_config.shard_rows, build_config.features.seed
        if has_no_model:
            train_proxy(
                build_config.corpus,
                output.directory,
                tokenizer=build_config.model.tokenizer,
                shard_rows=shard_rows,
                seed=seed,
                progress=progress,
            )
        build_config = resolve_settings(build_config, in_memory.model)
        if warm_up is not None:
            problem = ""
            if output.url is not None or in_memory.model is not None or in_memory.source is not None:
                problem = "needs paths of model and corpus, and a local --out; save objects first"
            elif build_config.train != "further":
                problem = "has no effect with --train new, where the model is not trained further; omit it"
            if problem:
                raise SettingsError(f"--warm-up: {problem}")
            checkpoint = train_warm_up(
                build_config.model,
                build_config.corpus,
                warm_up,
                output.directory,
                recipe=parsed_recipe,
                shard_rows=shard_rows,
                seed=seed,
                progress=progress,
            )
            build_config = with_model(build_config, checkpoint)
        if replay:
            refuse_replay(build_config, replay_settings)
        build_artifact(
            build_config,
            output.directory,
            progress=progress,
            cluster=cluster,
            in_memory=in_memory,
            must_be_trained=not untrained,
        )
        if replay:
            replay_targets(
                output.directory,
                parsed_recipe,
                replay_settings,
                overrides=build_config.model_dump(mode="json"),
                model=in_memory.model,
                progress=progress,
            )
    if output.url is None:
        return ArtifactReader.open(output.path)
    progress.stage("sending", rows=None, tokens=None)
    remote.publish(output.directory, output.url, SIGNED_MANIFEST)
    shutil.rmtree(output.directory, ignore_errors=True)  # the local copy
    return ArtifactReader.open(output.url)


def argument_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of arguments of `build`, by dotted name; a rule replaces the kernels of other settings."""
    named = {SETTINGS[argument]: value for argument, value in arguments.items()}
    kernels: list[str] | None = [] if named["features.rule"] else None
    return named | {"corpus.form": form_of_loss(arguments["loss"]), "features.kernels": kernels}


def output_location(out: Path | str) -> OutputLocation:
    """Return where the artifact `out` is built; that of a URL is built in a cache directory and then sent.

    Raises:
        SettingsError: `out` is empty, or a URL of files that exist in this process only.
    """
    path = remote.local_path(out)
    url, problem = remote.remote_url(path), ""
    if not str(out):
        problem = "missing; pass a directory for the artifact"
    elif url is not None and url.partition(":")[0] in remote.IN_PROCESS:
        problem = f"got {url}, which is lost when this process ends; choose a directory or an object store"
    if problem:
        raise SettingsError(f"--out: {problem}")
    return OutputLocation(path, url, path if url is None else remote.staging_directory(url))


def complete_settings(
    raw_settings: dict[str, Any], output: OutputLocation, in_memory: InMemory, *, resume: bool = False
) -> tuple[BuildSettings, bool]:
    """Validate the settings of a build, and return whether it has no model yet.

    If none is named and a new model is predicted, a small one (a proxy) is trained: the returned settings have the path
    that it will have in the artifact.

    Args:
        raw_settings: settings by name, which are changed.
        output: location of the artifact, which must be on disk for a proxy.
        in_memory: inputs that are passed as objects; a proxy is trained on a corpus that has a path.
        resume: `raw_settings` override those of an unfinished build.
    """
    command, run_file = "build", output.directory / RUN
    if resume and run_file.exists():
        recorded = without_foreign_code(read_yaml(run_file), str(run_file), raw_settings)
        raw_settings = override_settings(recorded, raw_settings)
    elif resume:
        command = f"build --resume: there is no {run_file}"
    has_no_model = (
        not get_setting(raw_settings, "model.path")
        and named_reader(raw_settings.get("model")) is None
        and get_setting(raw_settings, "train") in (None, "new")
        and all(get_setting(raw_settings, REQUIRED[flag]) for flag in ("--corpus", "--targets"))
        and output.url is None
        and in_memory.source is None
    )
    if has_no_model:
        max_length = get_setting(raw_settings, "corpus.max_length") or CONTEXT
        path = str(output.directory / MODEL)
        set_settings(raw_settings, {"train": "new", "corpus.max_length": max_length, "model.path": path})
    require_flags(raw_settings, REQUIRED, command)
    return build_settings(raw_settings), has_no_model


def with_model(settings: BuildSettings, path: Path) -> BuildSettings:
    """Return settings with another path of the model."""
    return settings.model_copy(update={"model": settings.model.model_copy(update={"path": str(path)})})


# -------------------------------------------------------------------- settings


def _put_inputs(raw_settings: dict[str, Any], model: Any, tokenizer: Any, corpus: Any, targets: Any) -> InMemory:
    """Put the arguments of `build` with these names into `raw_settings`: paths, or fingerprints of objects."""
    if isinstance(model, tuple | list):
        if len(model) != 2 or tokenizer is not None:
            raise SettingsError(f"model: got {len(model)} items, expected a model and its tokenizer")
        model, tokenizer = model
    reference: ReferenceModel | None = None
    if isinstance(model, nn.Module):
        if tokenizer is None or isinstance(tokenizer, str | Path):
            raise SettingsError(
                f"tokenizer: got {tokenizer}, but the model is an object; pass its tokenizer as an object too"
            )
        model_settings = ModelSettings.model_validate({**(get_setting(raw_settings, "model") or {}), "path": IN_MEMORY})
        reference = ReferenceModel.from_model(model, tokenizer, model_settings)  # validated like a checkpoint on disk
        model, tokenizer = IN_MEMORY + reference.fingerprint(), IN_MEMORY + reference.tokenizer.fingerprint
        device_dtype = {"model.dtype": dtype_name(reference.dtype), "model.device": str(reference.device)}
        set_settings(raw_settings, device_dtype)
    source: Source | None = None
    if corpus is not None and not isinstance(corpus, str | Path):
        source = table_source(corpus, pop_setting(raw_settings, "corpus.split"))
        ((_, _, digest),) = source.identity()
        corpus = IN_MEMORY + digest
    for name, value, expected in (
        ("model.path", model, "a path or a transformers model"),
        ("model.tokenizer", tokenizer, "a directory, or a tokenizer if the model is an object"),
        ("corpus.path", corpus, "a path or a table"),
    ):
        if value is not None and not isinstance(value, str | Path):
            raise SettingsError(f"{name}: got {type(value).__name__}, expected {expected}")
        set_settings(raw_settings, {name: None if value is None else str(value)})
    units: tuple[Unit, ...] = ()
    if targets is not None:
        names, units = _parse_targets(targets, get_setting(raw_settings, "targets.loss_on") or "completion")
        set_setting(raw_settings, "targets.names", names)
    return InMemory(reference, source, units)


def split_replay_settings(
    raw_settings: dict[str, Any],
    recipe: Path | str | Mapping[str, Any] | None,
    *,
    use_replay: bool,
    warm_up: bool = False,
) -> tuple[FineTuningRecipe | None, ReplaySettings]:
    """Remove the settings `replay` from `raw_settings`, and return the parsed recipe and the settings of the replay.

    Args:
        raw_settings: settings, from which `replay` is removed.
        recipe: training that is replayed, or that a warm-up begins.
        use_replay: the recipe is for a replay.
        warm_up: the recipe is for a warm-up.
    Raises:
        SettingsError: invalid settings or recipe, any of them without a replay, or a replay after a warm-up.
        ModelError: the recipe has something that is not differentiated.
    """
    settings = raw_settings.pop("replay", None)
    if use_replay and warm_up:
        raise SettingsError(
            "--warm-up: has no effect with --replay, which differentiates the whole training; omit one of them"
        )
    if not use_replay and (settings or (recipe is not None and not warm_up)):
        idle = f"replay.{next(iter(settings))}" if settings else "--recipe"
        raise SettingsError(f"{idle}: no effect without --replay{'' if settings else ' or --warm-up'}; add it")
    return read_recipe(recipe), validated(ReplaySettings, settings or {}, "replay")


def add_replay(
    out: Path | str,
    *,
    recipe: Path | str | Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> ReplayRecord:
    """Replay the targets of a finished artifact on this machine that have no replay, and return its record.

    Args:
        out: directory of the artifact.
        recipe: see `build`. Default: that of an earlier replay, if there is one.
        settings: `replay`, by default that of an earlier replay; custom code that may run; and the current paths of
            model and corpus: `model.path`, `model.tokenizer`, `corpus.path`.
        progress: receives stages, notes and numbers of rows.
    Raises:
        GraspError: other settings are given; not an artifact; its model or rows changed; or it has a replay by another
            recipe.
    """
    raw_settings = deepcopy(dict(settings or {}))
    replay_recipe, replay_settings = split_replay_settings(raw_settings, recipe, use_replay=True)
    overrides = pop_overrides(raw_settings)
    if raw_settings:
        raise SettingsError(
            f"--replay: got {', '.join(sorted(raw_settings))} as well; the settings of a finished artifact are fixed; "
            "use --recipe and --set replay.NAME=VALUE"
        )
    return replay_targets(
        _local_artifact(out, "--replay"), replay_recipe, replay_settings, overrides=overrides, progress=progress
    )


def add_targets(
    out: Path | str,
    targets: str | Sequence[str],
    *,
    settings: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> RelevanceSource:
    """Add targets to a finished artifact on this machine, and return from what their relevance was computed.

    Args:
        out: directory of the artifact.
        targets: names of targets, or files of questions.
        settings: settings of targets, e.g. `{"targets": {"seed": 3}}`; custom code that may run; and the current paths
            of model and corpus: `model.path`, `model.tokenizer`, `corpus.path`.
        progress: receives stages, notes and numbers of rows.
    Raises:
        SettingsError: other settings are given; they are fixed by the artifact.
        ArtifactError: not an artifact, or it has a target already; model or corpus differ from those of the build.
    """
    raw_settings = deepcopy(dict(settings or {}))
    overrides = pop_overrides(raw_settings)
    target_changes = raw_settings.pop("targets", {})
    if raw_settings or not isinstance(target_changes, dict) or "names" in target_changes:
        raise SettingsError(
            f"--add-target: got {', '.join(sorted(raw_settings)) or 'targets'} as well; a target is added with the "
            "settings of the artifact, of which --set can change only those of targets, e.g. targets.max_length"
        )
    path = _local_artifact(out, "--add-target")
    targets_of_build = ArtifactReader.open(path).manifest.settings["targets"]
    names, _ = _parse_targets(targets, "completion")
    target_settings = validated(TargetSettings, {**targets_of_build, **target_changes, "names": names}, "targets")
    return add_target(path, target_settings, overrides=overrides, progress=progress)


def pop_overrides(raw_settings: dict[str, Any]) -> dict[str, Any]:
    """Remove custom code and the current paths of model and corpus from settings, and return them."""
    overrides: dict[str, Any] = {}
    for name in (*code_settings(raw_settings), *PATH_SETTINGS):
        if value := pop_setting(raw_settings, name):
            set_setting(overrides, name, value)
    return overrides


def _local_artifact(out: Path | str, option: str) -> Path:
    """Return the path of an artifact that `option` changes; refuse a URL."""
    output = output_location(out)
    if output.url is not None:
        raise SettingsError(f"--out: got {out} with {option}, which changes an artifact on this machine only")
    return output.path


def _parse_targets(targets: Any, loss_on: Any) -> tuple[list[str], tuple[Unit, ...]]:
    """Return names of targets, and the units of those that are passed as objects; arguments as of `build`."""
    if isinstance(targets, str | Path):
        targets = split_names(str(targets))
    if isinstance(targets, Sequence) and all(isinstance(name, str | Path) for name in targets):
        return [str(name) for name in targets], ()
    if isinstance(targets, Sequence) and all(isinstance(unit, Mapping) for unit in targets):
        records: Any = ((f"targets, unit {k}", unit) for k, unit in enumerate(targets))
    else:
        try:
            source: Source = table_source(targets, what="targets")
        except CorpusError as err:
            raise TargetError(f"{err}; or pass names, or a list of dicts with prompt and completion") from err
        records = read_records(source)
    units = tuple(units_from_records(records, "units", loss_on))
    digest = hashlib.blake2b(json.dumps([asdict(unit) for unit in units], default=str).encode(), digest_size=16)
    return [IN_MEMORY + digest.hexdigest()], units


@contextmanager
def _restore_modes(model: Any) -> Iterator[None]:
    """Restore training modes and `requires_grad` of a model that was passed as an object, after the `with` block."""
    module = model if isinstance(model, nn.Module) else nn.Module()  # a path has no modes to restore
    state: list[tuple[Any, str, bool]] = [(child, "training", child.training) for child in module.modules()]
    state += [(parameter, "requires_grad", parameter.requires_grad) for parameter in module.parameters()]
    try:
        yield
    finally:
        for owner, name, value in state:
            setattr(owner, name, value)
