"""`grasp build` and `grasp.build`: resolve the settings, run the build, open the artifact.

Model, corpus and targets are paths or objects. In the settings an object is represented by a fingerprint of its content
instead of a path, so that a build is resumed if it is called with equal objects. Start with `build`.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from grasp.artifact.manifest import MANIFEST, SIGNED_MANIFEST, ReplayRecord
from grasp.artifact.reader import ArtifactReader
from grasp.build.add_replay import add_replay as replay_targets
from grasp.build.add_replay import refuse_replay, refuse_untrainable
from grasp.build.add_targets import Source as Added
from grasp.build.add_targets import add_target
from grasp.build.inputs import InMemory
from grasp.build.pipeline import build_artifact, resolve_settings
from grasp.build.proxy import CONTEXT, MODEL, train_proxy
from grasp.build.ray_cluster import ClusterSpec
from grasp.build.warm_up import warm_up as warm_up_model
from grasp.corpus.sources import IN_MEMORY, Source, table_source
from grasp.errors import CorpusError, SettingsError, TargetError
from grasp.models.causal_lm import ReferenceModel
from grasp.models.checkpoint import dtype_name
from grasp.progress import Progress, Silent
from grasp.settings import (
    CODE,
    BuildSettings,
    ModelSettings,
    ReplaySettings,
    TargetSettings,
    build_settings,
    form_of_loss,
    without_foreign_code,
)
from grasp.store import remote
from grasp.targets.load import load_units, read_records, split_names
from grasp.targets.unit_records import units_from_records
from grasp.targets.units import Unit
from grasp.training.recipe_files import FineTuningRecipe
from grasp.yaml_files import leaf, over, plain_settings, pop_leaf, put, put_all, read_yaml, require_flags, validated

REQUIRED = {
    "--model": ("model.path",),
    "--corpus": ("corpus.path",),
    "--targets": ("targets.names", "targets.datasets"),
}


PATH_SETTINGS = ("model.path", "model.tokenizer", "corpus.path")
# Settings of the arguments of `build` and of the options of `grasp build`. The values of those in SETTING_BY_ARGUMENT
# may also be objects.
SETTINGS = {
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
SETTING_BY_ARGUMENT = {
    "model": "model.path",
    "tokenizer": "model.tokenizer",
    "dtype": "model.dtype",
    "corpus": "corpus.path",
}


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

    The model is a causal LM, or an image classifier if its output layer is named: --set model.classifier.head=NAME.
    Without --model, a small one is trained from scratch on the corpus, in minutes on a CPU.

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
        keep_features: store the features that --add-target needs instead of another pass; 2 to 6 kB a token.
        like: use the moments of this artifact, so that grasp merge can merge the two.
        replay: also differentiate the training itself, for more accurate predictions of subsets at the price of several
            trainings; a finished artifact gets it later by --out and --replay alone.
        check: with --replay, also retrain once with changed weights of groups of rows, and compare the measured effect
            with the predicted one.
        warm_up: train the model so many steps on random rows first, and build from the result; a dozen steps can make
            predictions of fine-tuning on chats more accurate.
        recipe: training that --replay differentiates or --warm-up begins: a YAML or JSON file with the names of
            TrainingArguments, SFTConfig or Axolotl. Default: one epoch in batches of 16, at most 192 steps; for a new
            model, a small one from scratch, 4 epochs in batches of 32, at most 320 steps.
        settings: further settings, nested, or a YAML file; arguments override them.
        resume: resume an interrupted build, with its settings.
        untrained: accept a model that predicts no better than chance.
        cluster: Ray workers that run the model.
    Raises:
        GraspError: invalid input; finished work is kept.
    """
    values = (split, text_column, id_column, max_length, limit, train, form_of_loss(loss), rule, keep_features)
    arguments: dict[str, Any] = dict(
        zip(SETTINGS.values(), (*values, None if like is None else str(like)), strict=True)
    )
    arguments["features.kernels"] = [] if rule else None  # the rule replaces kernels of `settings`
    data = put_all(plain_settings(settings), arguments | {"replay.check": 1 if check else None})
    place, url, staged = staging_place(out)
    has_inputs = corpus is not None or targets is not None or bool({"corpus", "targets"} & data.keys())
    if replay and not has_inputs and (staged / MANIFEST).exists():
        add_replay(out, recipe=recipe, settings=data, progress=progress)
        return ArtifactReader.open(place)
    training, replay_settings = split_replay_settings(data, recipe, use_replay=replay, warm_up=warm_up is not None)
    with _preserve_modes(model[0] if isinstance(model, tuple | list) and model else model):
        in_memory = _put_inputs(data, model, tokenizer, dtype, corpus, targets)
        if resume and (staged / "run.yaml").exists():
            data = over(without_foreign_code(read_yaml(staged / "run.yaml"), str(staged / "run.yaml"), data), data)
        has_begun, progress = not resume or (staged / "run.yaml").exists(), progress or Silent()
        if needs_proxy(data, in_memory, url):
            _train_proxy(data, in_memory, staged, progress)
        if warm_up is not None:
            _warm_up(data, in_memory, url, staged, warm_up, training, progress)
        require_flags(data, REQUIRED, "build" if has_begun else f"build --resume: there is no {staged / 'run.yaml'}")
        build_config = build_settings(data)
        if cluster is not None and in_memory.model is not None:
            raise SettingsError("model: got an object, but workers load it from disk; save it and pass its directory")
        if url is not None and remote.is_published(url, SIGNED_MANIFEST):
            if not resume:
                raise SettingsError(f"--out: a complete artifact exists at {url}; choose another URL, or delete it")
            progress.note(f"{url}: finished; nothing to do")
            return ArtifactReader.open(url)
        if replay:
            refuse_replay(resolve_settings(build_config, in_memory), replay_settings)
        build_artifact(
            build_config, staged, progress=progress, cluster=cluster, in_memory=in_memory, must_be_trained=not untrained
        )
        if replay:
            replay_targets(staged, training, replay_settings, overrides=data, model=in_memory.model, progress=progress)
    if url is not None:
        progress.stage("sending", rows=None, tokens=None)
        remote.publish(staged, url, SIGNED_MANIFEST)
        remote.discard_staging(url)
    return ArtifactReader.open(place if url is None else url)


def needs_proxy(data: dict[str, Any], in_memory: InMemory, url: str | None) -> bool:
    """Return whether the build trains its own model: without a checkpoint, on a corpus on disk, for a new model."""
    has_inputs = all(any(leaf(data, path) for path in REQUIRED[flag]) for flag in ("--corpus", "--targets"))
    on_disk = url is None and in_memory.source is None
    return has_inputs and on_disk and leaf(data, "model.path") is None and leaf(data, "train") in (None, "new")


def proxy_settings(data: dict[str, Any], out: Path) -> BuildSettings:
    """Complete the settings `data` of a build without a model, and return them with that of the artifact `out`."""
    put(data, "train", "new")
    if leaf(data, "corpus.max_length") is None:
        put(data, "corpus.max_length", CONTEXT)
    return build_settings(over(deepcopy(data), {"model": {"path": str(out / MODEL)}}))


def _train_proxy(data: dict[str, Any], in_memory: InMemory, out: Path, progress: Progress) -> None:
    """Train the model of a build that has none, and put it into the settings `data`."""
    settings = proxy_settings(data, out)
    if not in_memory.units:
        load_units(settings.targets)  # errors are reported before a training of minutes
    trained = train_proxy(
        out,
        settings.corpus,
        settings.model.tokenizer,
        seed=settings.features.seed,
        shard_rows=settings.shard_rows,
        progress=progress,
    )
    put(data, "model.path", str(trained))


def _warm_up(
    data: dict[str, Any],
    in_memory: InMemory,
    url: str | None,
    out: Path,
    steps: int,
    recipe: FineTuningRecipe | None,
    progress: Progress,
) -> None:
    """Train the model of a build for some steps, and put the result into the settings `data`."""
    if leaf(data, "model.path") == str(out / MODEL):
        return  # resumed by --resume, after the warm-up
    if steps < 1:
        raise SettingsError(f"--warm-up: got {steps}, expected at least 1 step")
    if url is not None or in_memory.model is not None or in_memory.source is not None:
        raise SettingsError("--warm-up: requires paths of model and corpus, and a local --out; save the objects first")
    require_flags(data, REQUIRED, "build")
    settings = resolve_settings(build_settings(data), in_memory)
    refuse_untrainable(settings, "--warm-up")
    if settings.train != "further":
        raise SettingsError(
            "--warm-up: has no effect with --train new, where the model is not trained further; omit it"
        )
    if not in_memory.units:
        load_units(settings.targets)  # errors are reported before the training
    put(data, "model.path", str(warm_up_model(out, settings, steps, recipe, progress)))


def _put_inputs(
    data: dict[str, Any], model: Any, tokenizer: Any, dtype: str | None, corpus: Any, targets: Any
) -> InMemory:
    """Put the inputs into the settings `data`; objects are named by their fingerprints there, and returned.

    Raises:
        SettingsError: an input of another type, or a model object without its tokenizer.
    """
    reference, source = None, None
    units: tuple[Unit, ...] = ()
    if isinstance(model, tuple | list):
        if len(model) != 2 or tokenizer is not None:
            raise SettingsError(f"model: got {len(model)} items, expected a model and its tokenizer")
        model, tokenizer = model
    if isinstance(model, nn.Module):
        if tokenizer is None or isinstance(tokenizer, str | Path):
            raise SettingsError(
                f"tokenizer: got {tokenizer}, but the model is an object; pass its tokenizer as an object too"
            )
        model_settings = ModelSettings.model_validate({"path": IN_MEMORY, **(leaf(data, "model") or {})})
        reference = ReferenceModel.from_model(model, tokenizer, model_settings)  # validated like a checkpoint on disk
        tokenizer = IN_MEMORY + reference.tokenizer.fingerprint
        put(data, "model.device", str(reference.device))
        dtype, model = dtype_name(reference.dtype), IN_MEMORY + reference.fingerprint()
    if corpus is not None and not isinstance(corpus, str | Path):
        source = table_source(corpus, leaf(data, "corpus.split"))
        data.get("corpus", {}).pop("split", None)
        ((_, _, digest),) = source.identity()
        corpus = IN_MEMORY + digest
    for setting, value, expected in (
        ("model.path", model, "a path or a transformers model"),
        ("model.tokenizer", tokenizer, "a directory, or a tokenizer if the model is an object"),
        ("model.dtype", dtype, "float32, bfloat16 or float16"),
        ("corpus.path", corpus, "a path or a table"),
    ):
        if value is not None and not isinstance(value, str | Path):
            raise SettingsError(f"{setting}: got {type(value).__name__}, expected {expected}")
        if value is not None:
            put(data, setting, str(value))
    if targets is not None:
        names, units = _targets(targets, leaf(data, "targets.loss_on") or "completion")
        put(data, "targets.names", names)
    return InMemory(reference, source, units)


def staging_place(out: Path | str) -> tuple[Path, str | None, Path]:
    """Return the path of the artifact, its URL if it has one, and the local directory in which it is built."""
    if not str(out):
        raise SettingsError("--out: missing; pass a directory for the artifact")
    place = remote.local_path(out)
    url = remote.remote_url(place)
    if url is not None and url.partition(":")[0] in remote.IN_PROCESS:
        raise SettingsError(
            f"--out: got {url}, which is lost when this process ends; choose a directory or an object store"
        )
    return place, url, place if url is None else remote.staging_directory(url)


def split_replay_settings(
    data: dict[str, Any],
    recipe: Path | str | Mapping[str, Any] | None,
    *,
    use_replay: bool,
    warm_up: bool = False,
) -> tuple[FineTuningRecipe | None, ReplaySettings]:
    """Remove the settings `replay` from `data`, and return the recipe and the settings of the replay.

    Args:
        data: settings, from which `replay` is removed.
        recipe: training that is replayed, or that a warm-up begins.
        use_replay: the recipe is for a replay.
        warm_up: the recipe is for a warm-up.

    Raises:
        SettingsError: invalid settings or recipe, any of them without a replay, or a replay after a warm-up.
        ModelError: the recipe has something that is not differentiated.
    """
    settings = data.pop("replay", None)
    if use_replay and warm_up:
        raise SettingsError(
            "--warm-up: has no effect with --replay, which differentiates the whole training; omit one of them"
        )
    if not use_replay and settings:
        raise SettingsError(f"replay.{next(iter(settings))}: no effect without --replay; add it")
    if not use_replay and not warm_up and recipe is not None:
        raise SettingsError("--recipe: no effect without --replay or --warm-up; add one")
    if settings is not None and not isinstance(settings, Mapping):
        raise SettingsError(f"replay: got {settings!r}, expected settings such as replay.orders; see docs/reference.md")
    replay_settings = validated(ReplaySettings, settings or {}, "replay")
    if recipe is None:
        return None, replay_settings
    if isinstance(recipe, Mapping):
        return FineTuningRecipe.from_mapping(recipe), replay_settings
    return FineTuningRecipe.read(Path(recipe)), replay_settings


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
        settings: `replay`; custom code that may run; and the current paths of model and corpus: `model.path`,
            `model.tokenizer`, `corpus.path`.
        progress: receives stages, notes and numbers of rows.
    Raises:
        GraspError: other settings are given; not an artifact; its model or rows changed; or it has a replay by another
            recipe.
    """
    data = deepcopy(dict(settings or {}))
    replay_recipe, replay_settings = split_replay_settings(data, recipe, use_replay=True)
    overrides = pop_overrides(data)
    if data:
        raise SettingsError(
            f"--replay: got {', '.join(sorted(data))} as well; the settings of a finished artifact are fixed; use "
            "--recipe and --set replay.NAME=VALUE"
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
) -> Added:
    """Add targets to a finished artifact on this machine, and return the source of their relevance.

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
    data = deepcopy(dict(settings or {}))
    overrides = pop_overrides(data)
    target_changes = data.pop("targets", {})
    if data or not isinstance(target_changes, dict) or "names" in target_changes:
        raise SettingsError(
            f"--add-target: got {', '.join(sorted(data)) or 'targets'} as well; a target is added with the settings "
            "of the artifact, of which --set can change only those of targets, e.g. targets.max_length"
        )
    place = _local_artifact(out, "--add-target")
    old = ArtifactReader.open(place).manifest.settings["targets"]
    names, _ = _targets(targets, "completion")
    target_settings = validated(TargetSettings, {**old, "datasets": [], **target_changes, "names": names}, "targets")
    return add_target(place, target_settings, overrides=overrides, progress=progress)


def pop_overrides(data: dict[str, Any]) -> dict[str, Any]:
    """Remove custom code and the current paths of model and corpus from settings, and return them."""
    overrides: dict[str, Any] = {}
    for name in (*CODE, *PATH_SETTINGS):
        if value := pop_leaf(data, name):
            put(overrides, name, value)
    return overrides


def _local_artifact(out: Path | str, option: str) -> Path:
    """Return the path of an artifact that `option` changes; refuse a URL."""
    place, url, _ = staging_place(out)
    if url is not None:
        raise SettingsError(f"--out: got {out} with {option}, which changes an artifact on this machine only")
    return place


def _targets(targets: Any, loss_on: Any) -> tuple[list[str], tuple[Unit, ...]]:
    """Return names of targets, and the units of those that are given in memory."""
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
def _preserve_modes(model: Any) -> Iterator[None]:
    """Restore training modes and `requires_grad` of a model that was passed as an object."""
    module_or_empty = model if isinstance(model, nn.Module) else nn.Module()
    modes = [(module, module.training) for module in module_or_empty.modules()]
    requires_grad = [(parameter, parameter.requires_grad) for parameter in module_or_empty.parameters()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, required in requires_grad:
            parameter.requires_grad_(required)
