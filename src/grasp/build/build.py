"""`grasp build` and `grasp.build`: settings out of whatever the user has, the build, the artifact opened.

Model, corpus and targets are named, or given as objects. An object is told by a fingerprint of its content, which
stands in the settings where a path would: a build goes on, or is finished, if the same objects are given again.
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

from grasp.artifact.manifest import SIGNED_MANIFEST
from grasp.artifact.reader import ArtifactReader
from grasp.build.add_targets import Source as Added
from grasp.build.add_targets import add_target
from grasp.build.inputs import InMemory
from grasp.build.pipeline import build_artifact
from grasp.build.ray_cluster import ClusterSpec
from grasp.corpus.sources import IN_MEMORY, Source, table_source
from grasp.errors import CorpusError, SettingsError, TargetError
from grasp.models.causal_lm import ReferenceModel
from grasp.models.checkpoint import dtype_name
from grasp.progress import Progress, Silent
from grasp.settings import CODE, ModelSettings, TargetSettings, build_settings, without_foreign_code
from grasp.store import remote
from grasp.targets.load import records_of, units_of
from grasp.targets.units import Unit
from grasp.yaml_files import leaf, over, plain_settings, pop_leaf, put, put_all, read_yaml, require_flags, validated

REQUIRED = {
    "--model": ("model.path",),
    "--corpus": ("corpus.path",),
    "--targets": ("targets.names", "targets.datasets"),
}


PLACES = ("model.path", "model.tokenizer", "corpus.path")
# Arguments of `build`, and options of `grasp build`, that are settings; `model`, `tokenizer`, `dtype`, `corpus` and
# `targets` may be objects, and are named after these.
SETTINGS = {
    "split": "corpus.split",
    "text_column": "corpus.text_column",
    "id_column": "corpus.row_id_column",
    "max_length": "corpus.max_length",
    "limit": "corpus.limit",
    "train": "train",
    "rule": "features.rule",
    "keep_features": "keep_features",
    "like": "like",
}
NAMED = {"model": "model.path", "tokenizer": "model.tokenizer", "dtype": "model.dtype", "corpus": "corpus.path"}


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
    rule: str | None = None,
    dtype: str | None = None,
    keep_features: bool | None = None,
    like: str | Path | None = None,
    settings: Mapping[str, Any] | Path | str | None = None,
    resume: bool = False,
    untrained: bool = False,
    cluster: ClusterSpec | None = None,
    progress: Progress | None = None,
) -> ArtifactReader:
    """Run a model once over a corpus and write an artifact.

    The same command goes on where it was cut off.

    The model is a causal LM, or an image classifier if its output layer is named: --set model.classifier.head=NAME.

    In Python what is there already is not done again either: one that is finished is opened.

    Args:
        model: checkpoint that reads the corpus: a directory or a hub name. In Python also a transformers model, with
            `tokenizer` or as a pair with it.
        corpus: texts, conversations or token ids: Parquet, JSONL, a directory of them, a `datasets` directory, a hub
            name or a URL. In Python also a pandas DataFrame, a pyarrow Table, a `datasets.Dataset`.
        targets: what the model should do well: tasks (sciq, ...) or files of questions (exam.jsonl; a line is
            {"question": ..., "answer": ...}, or prompt and completion), separated by commas. In Python also a list of
            them; or units: a list of dicts with prompt and completion (or question and answer), or a DataFrame of them.
        out: directory for the artifact, or a URL such as s3://bucket/art.
        tokenizer: the model's tokenizer. Default: the one in its directory. In Python a transformers tokenizer where
            the model is an object.
        split: split of a corpus that has several.
        text_column: column of the text, or of turns. Default: text or messages.
        id_column: column of the names. Default: row_id or id; "" for none.
        max_length: tokens of the longest row; longer documents become several. Default: what the model reads, at most
            2048.
        limit: read only the first N documents, for a quick look.
        train: what will be trained on the corpus: this model further (fine-tuning), or a new one from scratch.
            Default: what the checkpoint says, as the references of grasp retrain do.
        rule: which kernels compare rows with answers: default, forward (none that takes a backward pass) or paper.
        dtype: numbers of the model: float32, bfloat16 or float16. Default: float32 on a CPU, else bfloat16.
        keep_features: keep what --add-target needs, so that it runs no model; 2 to 6 kB a token.
        like: take the moments of this artifact, so that grasp merge can join the two.
        settings: any other settings, nested, or the YAML file of them; arguments win.
        resume: go on with a build that was cut off, with its settings.
        untrained: go on although the model predicts no better than chance.
        cluster: Ray workers that run the model.
    Raises:
        GraspError: bad input, named; nothing that was finished is lost.
    """
    values = (split, text_column, id_column, max_length, limit, train, rule, keep_features)
    arguments: dict[str, Any] = dict(
        zip(SETTINGS.values(), (*values, None if like is None else str(like)), strict=True)
    )
    arguments["features.kernels"] = [] if rule else None  # settings may name those of another rule
    data = put_all(plain_settings(settings), arguments)
    place, url, staged = staging_place(out)
    with _as_it_was(model[0] if isinstance(model, tuple | list) and model else model):
        # what is an object is named by its fingerprint, and handed on beside the settings
        reference, source = None, None
        units: tuple[Unit, ...] = ()
        if isinstance(model, tuple | list):
            if len(model) != 2 or tokenizer is not None:
                raise SettingsError(f"model: got {len(model)} things, expected a model and its tokenizer")
            model, tokenizer = model
        if isinstance(model, nn.Module):
            if tokenizer is None or isinstance(tokenizer, str | Path):
                raise SettingsError(
                    f"tokenizer: got {tokenizer}, but the model is an object; give its tokenizer as one too"
                )
            model_settings = ModelSettings.model_validate({"path": IN_MEMORY, **(leaf(data, "model") or {})})
            reference = ReferenceModel.from_model(model, tokenizer, model_settings)  # proven as one from a disk is
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
            ("model.tokenizer", tokenizer, "a directory, or with a model that is an object a tokenizer"),
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
        in_memory = InMemory(reference, source, units)
        if resume and (staged / "run.yaml").exists():
            data = over(without_foreign_code(read_yaml(staged / "run.yaml"), str(staged / "run.yaml"), data), data)
        begun = not resume or (staged / "run.yaml").exists()
        require_flags(data, REQUIRED, "build" if begun else f"build --resume: there is no {staged / 'run.yaml'}")
        checked, progress = build_settings(data), progress or Silent()
        if cluster is not None and in_memory.model is not None:
            raise SettingsError("model: got an object, but workers load it from a disk; save it and name its directory")
        if url is not None and remote.is_published(url, SIGNED_MANIFEST):
            if not resume:
                raise SettingsError(f"--out: a complete artifact lies at {url}; choose another place, or delete it")
            progress.note(f"{url}: finished already; nothing was read again")
            return ArtifactReader.open(url)
        build_artifact(
            checked, staged, progress=progress, cluster=cluster, in_memory=in_memory, must_be_trained=not untrained
        )
    if url is not None:
        progress.stage("sending", rows=None, tokens=None)
        remote.publish(staged, url, SIGNED_MANIFEST)
        remote.discard_staging(url)
    return ArtifactReader.open(place if url is None else url)


def staging_place(out: Path | str) -> tuple[Path, str | None, Path]:
    """The path or URL of the artifact, and where it is built on this machine."""
    if not str(out):
        raise SettingsError("--out: got nothing, expected a directory of its own for the artifact")
    place = remote.local_path(out)
    url = remote.remote_url(place)
    if url is not None and url.partition(":")[0] in remote.IN_PROCESS:
        raise SettingsError(f"--out: got {url}, which ends with this process; choose a directory or an object store")
    return place, url, place if url is None else remote.staging_directory(url)


def add_targets(
    out: Path | str,
    targets: str | Sequence[str],
    *,
    settings: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Added:
    """Add targets to a finished artifact on this machine; returns where their relevance came from.

    Args:
        settings: of targets, e.g. `{"targets": {"seed": 3}}`, those that name code that may be run, and where model
            and corpus are now: `model.path`, `model.tokenizer`, `corpus.path`.
    Raises:
        SettingsError: others are given: the artifact has its own.
        ArtifactError: it is none, or has a target already; model or corpus are no longer its own.
    """
    data, overrides = deepcopy(dict(settings or {})), dict[str, Any]()
    for name in (*CODE, *PLACES):  # the user's own word for what is run, and for where things are
        if value := pop_leaf(data, name):
            put(overrides, name, value)
    target_changes = data.pop("targets", {})
    if data or not isinstance(target_changes, dict) or "names" in target_changes:
        raise SettingsError(
            f"--add-target: got {', '.join(sorted(data)) or 'targets'} as well; a target is added with the artifact's "
            "own settings, of which targets.max_length and the like can be changed with --set, and no other"
        )
    place, url, _ = staging_place(out)
    if url is not None:
        raise SettingsError(f"--out: got {out} with --add-target, which changes an artifact on this machine only")
    old = ArtifactReader.open(place).manifest.settings["targets"]
    names, _ = _targets(targets, "completion")
    target_settings = validated(TargetSettings, {**old, "datasets": [], **target_changes, "names": names}, "targets")
    return add_target(place, target_settings, overrides=overrides, progress=progress)


def _targets(targets: Any, loss_on: Any) -> tuple[list[str], tuple[Unit, ...]]:
    """Names of targets, and the units behind them that are in memory."""
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
            raise TargetError(f"{err}; or names, or a list of dicts with prompt and completion") from err
        records = records_of(source)
    units = tuple(units_of(records, "units", loss_on))
    digest = hashlib.blake2b(json.dumps([asdict(unit) for unit in units], default=str).encode(), digest_size=16)
    return [IN_MEMORY + digest.hexdigest()], units


def split_names(text: str) -> list[str]:
    """Names separated by commas; a file that is there keeps the commas of its name."""
    if Path(text).is_file():
        return [text]
    return [part.strip() for part in text.split(",") if part.strip()]


@contextmanager
def _as_it_was(model: Any) -> Iterator[None]:
    """Give a model that is an object back in the mode and with the gradients that it came with."""
    owned = model if isinstance(model, nn.Module) else nn.Module()
    modes = [(module, module.training) for module in owned.modules()]
    grads = [(parameter, parameter.requires_grad) for parameter in owned.parameters()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, required in grads:
            parameter.requires_grad_(required)
