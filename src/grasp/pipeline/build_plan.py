"""Turn the arguments of `build` into a `BuildPlan`: settings, inputs that are passed as objects, and the output.

Arguments become validated `BuildSettings`, in which an object is named by a fingerprint of its content instead of a
path, so that a build is resumed if it is called with equal objects. All later steps read the plan. Start with
`plan_build`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from grasp.artifact.manifest import MODEL, RUN
from grasp.corpus.sources import IN_MEMORY, Source, table_source
from grasp.errors import CorpusError, SettingsError, TargetError
from grasp.models.causal_lm import ReferenceModel
from grasp.models.checkpoint import dtype_name
from grasp.pipeline.add_replay import refuse_replay
from grasp.pipeline.inputs import InMemory
from grasp.pipeline.pipeline import resolve_settings
from grasp.pipeline.proxy import CONTEXT
from grasp.pipeline.replay_plan import read_recipe
from grasp.pipeline.warm_up import warm_up_problem
from grasp.settings import (
    BuildSettings,
    ReplaySettings,
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
    read_yaml,
    require_flags,
    set_settings,
    validated,
)

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
PATH_SETTINGS = ("model.path", "model.tokenizer", "corpus.path")
REQUIRED = {"--model": "model.path", "--corpus": "corpus.path", "--targets": "targets.names"}


@dataclass(frozen=True, slots=True)
class OutputLocation:
    """Where a build writes: path or URL, URL (None: it stays on this machine), and the local directory of the build."""

    path: Path
    url: str | None
    directory: Path


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """The validated inputs of all steps of a build.

    Attributes:
        settings: settings of the build, with the training and the kernels decided.
        in_memory: inputs that are passed as objects.
        trains_proxy: the model does not exist yet: `train_proxy` trains it.
        warm_up: steps of the training that are taken before the model is read. None: half of them.
        recipe: training that is predicted: its length, the replay, and the warm-up. None: the default.
        replay: settings of the replay. None: the targets are not replayed.
    """

    settings: BuildSettings
    in_memory: InMemory
    trains_proxy: bool
    warm_up: int | None
    recipe: FineTuningRecipe | None
    replay: ReplaySettings | None


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


def local_artifact(out: Path | str, option: str) -> Path:
    """Return the path of an artifact that `option` changes; refuse a URL."""
    output = output_location(out)
    if output.url is not None:
        raise SettingsError(f"--out: got {out} with {option}, which changes an artifact on this machine only")
    return output.path


def split_overrides(nested: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return custom code and the current paths of model and corpus, and the names of groups with other settings."""
    names = (*code_settings(nested), *PATH_SETTINGS)
    overrides = set_settings({}, {name: get_setting(nested, name) for name in names})
    return overrides, sorted(group for group, values in nested.items() if values != overrides.get(group, {}))


def plan_build(
    nested: dict[str, Any],
    output: OutputLocation,
    model: Any = None,
    tokenizer: Any = None,
    corpus: Any = None,
    targets: Any = None,
    *,
    recipe: Path | str | Mapping[str, Any] | None = None,
    replay: bool = False,
    warm_up: int | None = None,
    resume: bool = False,
) -> BuildPlan:
    """Validate all inputs of a build.

    If no model is named and a new one is predicted, a small one (a proxy) is trained: the settings have the path that
    it will have in the artifact.

    Args:
        nested: settings by name; `replay` are those of the replay.
        output: where the artifact is written.
        model: see `build`, as the following arguments.
        tokenizer: of the model.
        corpus: path or table.
        targets: names or units.
        recipe: training that is predicted.
        replay: whether the targets are replayed.
        warm_up: steps of the training to the state at which the model is read, see `build`.
        resume: `nested` overrides the settings of an unfinished build.
    Raises:
        GraspError: an input is missing or invalid.
    """
    raw_replay = nested.pop("replay", None) or {}
    if raw_replay and not replay:
        raise SettingsError(f"replay.{next(iter(raw_replay))}: no effect without --replay; add it")
    replay_settings = validated(ReplaySettings, raw_replay, "replay") if replay else None
    if (parsed_recipe := read_recipe(recipe)) is not None:
        nested["recipe"] = parsed_recipe.model_dump(mode="json")
    if isinstance(model, tuple | list):
        if len(model) != 2 or tokenizer is not None:
            raise SettingsError(f"model: got {len(model)} items, expected a model and its tokenizer")
        model, tokenizer = model
    named: dict[str, Any] = {"targets.names": None if targets is None else [IN_MEMORY]}
    if isinstance(targets, str | Path):
        named["targets.names"] = split_names(str(targets))
    elif isinstance(targets, Sequence) and all(isinstance(name, str | Path) for name in targets):
        named["targets.names"] = [str(name) for name in targets]
    for setting, value, is_object, expected in (
        ("model.path", model, isinstance(model, nn.Module), "a path or a transformers model"),
        ("model.tokenizer", tokenizer, isinstance(model, nn.Module), "a directory, or a tokenizer of a model object"),
        ("corpus.path", corpus, not isinstance(corpus, str | Path), ""),
    ):
        if value is not None and not is_object and not isinstance(value, str | Path):
            raise SettingsError(f"{setting}: got {type(value).__name__}, expected {expected}")
        named[setting] = None if value is None else IN_MEMORY if is_object else str(value)
    set_settings(nested, named)

    command, run_file = "build", output.directory / RUN
    if resume and run_file.exists():
        nested = override_settings(without_foreign_code(read_yaml(run_file), str(run_file), nested), nested)
    elif resume:
        command = f"build --resume: there is no {run_file}"
    trains_proxy = (
        not get_setting(nested, "model.path")
        and named_reader(nested.get("model")) is None
        and get_setting(nested, "train") in (None, "new")
        and output.url is None
        and named["corpus.path"] != IN_MEMORY
    )
    if trains_proxy:
        max_length = get_setting(nested, "corpus.max_length") or CONTEXT
        path = str(output.directory / MODEL)
        set_settings(nested, {"train": "new", "corpus.max_length": max_length, "model.path": path})
    require_flags(nested, REQUIRED, command)
    settings, in_memory = validated(BuildSettings, nested, "settings"), InMemory()
    if IN_MEMORY in (named["model.path"], named["corpus.path"]) or named["targets.names"] == [IN_MEMORY]:
        settings, in_memory = open_objects(settings, model, tokenizer, corpus, targets)
    if trains_proxy or warm_up or recipe is not None:
        load_units(settings.targets, in_memory.units)  # report errors before the training
    settings = resolve_settings(settings, in_memory.model)
    if replay_settings is not None:
        refuse_replay(settings)
    recorded = None if settings.recipe is None else validated(FineTuningRecipe, settings.recipe, "recipe")
    if recorded is not None and not (replay or "gradient" in settings.features.kernels):
        raise SettingsError(
            "--recipe: no effect with --train new without --replay, nor without the gradient kernel; omit it"
        )
    problem, parsed_recipe = "", parsed_recipe or recorded
    if output.url is not None or in_memory.model is not None or in_memory.source is not None:
        problem = "needs paths of model and corpus, and a local --out; save objects first"
    elif settings.train != "further":
        problem = "has no effect with --train new, where the model is not trained further; omit it"
    else:
        problem = warm_up_problem(settings.model, settings.corpus, parsed_recipe)
    if warm_up and problem:
        raise SettingsError(f"--warm-up: {problem}")
    is_default = recipe is not None and "gradient" in settings.features.kernels and settings.like is None
    if warm_up is None and (problem or not is_default):
        warm_up = 0
    # the notes of a translated recipe are not recorded
    return BuildPlan(settings, in_memory, trains_proxy, warm_up, parsed_recipe, replay_settings)


def open_objects(
    settings: BuildSettings, model: Any, tokenizer: Any, corpus: Any, targets: Any
) -> tuple[BuildSettings, InMemory]:
    """Open the inputs that are passed as objects, and put their fingerprints into the settings."""
    reference: ReferenceModel | None = None
    source: Source | None = None
    units: Sequence[Unit] = ()
    updates = dict[str, dict[str, Any]]()
    if isinstance(model, nn.Module):
        if tokenizer is None or isinstance(tokenizer, str | Path):
            raise SettingsError(
                f"tokenizer: got {tokenizer}, but the model is an object; pass its tokenizer as an object too"
            )
        reference = ReferenceModel.from_model(model, tokenizer, settings.model)  # validated like a checkpoint on disk
        updates["model"] = {
            "path": IN_MEMORY + reference.fingerprint(),
            "tokenizer": IN_MEMORY + reference.tokenizer.fingerprint,
            "dtype": dtype_name(reference.dtype),
            "device": str(reference.device),
        }
    if settings.corpus.path == IN_MEMORY:
        source = table_source(corpus, settings.corpus.split)
        ((_, _, digest),) = source.identity()
        updates["corpus"] = {"path": IN_MEMORY + digest, "split": None}
    if settings.targets.names == (IN_MEMORY,):
        if isinstance(targets, Sequence) and all(isinstance(unit, Mapping) for unit in targets):
            records: Any = ((f"targets, unit {k}", unit) for k, unit in enumerate(targets))
        else:
            try:
                records = read_records(table_source(targets, what="targets"))
            except CorpusError as err:
                raise TargetError(f"{err}; or pass names, or a list of dicts with prompt and completion") from err
        units = tuple(units_from_records(records, "units", settings.targets.loss_on))
        content = json.dumps([asdict(unit) for unit in units], default=str).encode()
        digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        updates["targets"] = {"names": (IN_MEMORY + digest,)}
    groups = {group: getattr(settings, group).model_copy(update=fields) for group, fields in updates.items()}
    return settings.model_copy(update=groups), InMemory(reference, source, units)


def with_model(settings: BuildSettings, path: Path) -> BuildSettings:
    """Return settings with another path of the model."""
    return settings.model_copy(update={"model": settings.model.model_copy(update={"path": str(path)})})
