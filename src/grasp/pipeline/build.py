"""The public functions `build` and `add_replay`.

`build` turns its arguments into a plan and then calls what may also be called alone: `train_proxy` and `warm_up` train
a checkpoint, `build_artifact` reads one, and `replay_targets` adds to an artifact. Start with `build`.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grasp.artifact.manifest import MANIFEST, SIGNED_MANIFEST, ReplayRecord
from grasp.artifact.reader import ArtifactReader
from grasp.errors import SettingsError
from grasp.models.causal_lm import restored_modes
from grasp.pipeline.add_replay import replay_targets
from grasp.pipeline.build_plan import (
    argument_settings,
    local_artifact,
    output_location,
    plan_build,
    split_overrides,
    with_model,
)
from grasp.pipeline.pipeline import build_artifact
from grasp.pipeline.proxy import train_proxy
from grasp.pipeline.ray_cluster import ClusterSpec
from grasp.pipeline.replay_plan import read_recipe
from grasp.pipeline.warm_up import warm_up as train_warm_up
from grasp.progress import Progress
from grasp.settings import ReplaySettings
from grasp.store import remote
from grasp.yaml_files import plain_settings, set_settings, validated


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
        rule: set of kernels: default or paper.
        dtype: dtype of the model: float32, bfloat16 or float16. Default: float32 on a CPU, else bfloat16.
        keep_features: store features, 2 to 6 kB per token, so that --add-target needs no other pass over the corpus.
        like: use the moments (means and variances of features) of this artifact, so that grasp merge can merge both.
        replay: also differentiate the training itself, for more accurate predictions of subsets at the price of several
            trainings; a finished artifact gets it later by --out and --replay alone.
        warm_up: take the first N steps of the training that is predicted, and read the corpus with the result; 0: read
            it with the model itself. Default: half of the steps of --recipe, since predictions of fine-tuning are more
            accurate there; 0 without it, for adapters, preference pairs and URLs, and in Python for objects.
        recipe: settings of the training that is predicted, which --replay differentiates and --warm-up begins; how long
            it is also matters to gradients (--train further). A YAML or JSON file with the names of TrainingArguments,
            SFTConfig or Axolotl. Default: one epoch in batches of 16, at most 192
            steps; for a new model, a small one from scratch, 4 epochs in batches of 32, at most 320 steps.
        settings: further settings, nested, or a YAML file; arguments override them.
        resume: resume an interrupted build, with its settings; name --replay again.
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
    nested = set_settings(plain_settings(settings), argument_settings(arguments))
    output, progress = output_location(out), progress or Progress()
    has_inputs = model is not None or corpus is not None or targets is not None or {"corpus", "targets"} & nested.keys()
    # without an artifact either, `add_replay` reports that there is none
    is_finished = (output.directory / MANIFEST).exists() or not (resume or "model" in nested)
    if replay and is_finished and not has_inputs:
        add_replay(out, recipe=recipe, settings=nested, progress=progress)
        return ArtifactReader.open(output.path)
    if output.url is not None and remote.is_published(output.url, SIGNED_MANIFEST):
        if not resume:
            raise SettingsError(f"--out: a complete artifact exists at {output.url}; choose another URL, or delete it")
        progress.note(f"{output.url}: finished; nothing to do")
        return ArtifactReader.open(output.url)

    with restored_modes(model):
        how: dict[str, Any] = {"recipe": recipe, "replay": replay, "warm_up": warm_up, "resume": resume}
        plan = plan_build(nested, output, model, tokenizer, corpus, targets, **how)
        config, place = plan.settings, output.directory
        common: dict[str, Any] = {"shard_rows": config.shard_rows, "seed": config.features.seed, "progress": progress}
        if plan.trains_proxy:
            train_proxy(config.corpus, place, tokenizer=config.model.tokenizer, **common)
        if plan.warm_up != 0:
            checkpoint = train_warm_up(config.model, config.corpus, plan.warm_up, place, recipe=plan.recipe, **common)
            config = with_model(config, checkpoint)
        build_artifact(
            config, place, in_memory=plan.in_memory, cluster=cluster, must_be_trained=not untrained, progress=progress
        )
        if plan.replay is not None:
            # the settings of the user: of the model before a warm-up, with which a replay begins
            user, reference = plan.settings.model_dump(mode="json"), plan.in_memory.model
            replay_targets(place, plan.recipe, plan.replay, overrides=user, model=reference, progress=progress)
    if output.url is not None:
        progress.stage("sending", rows=None, tokens=None)
        remote.publish(place, output.url, SIGNED_MANIFEST)
        shutil.rmtree(place, ignore_errors=True)  # the local copy
    return ArtifactReader.open(output.url or output.path)


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
    nested = dict(settings or {})
    replay_settings = validated(ReplaySettings, nested.pop("replay", {}), "replay")
    overrides, others = split_overrides(nested)
    if others:
        raise SettingsError(
            f"--replay: got {', '.join(others)} as well; the settings of a finished artifact are fixed; "
            "use --recipe and --set replay.NAME=VALUE"
        )
    return replay_targets(
        local_artifact(out, "--replay"), read_recipe(recipe), replay_settings, overrides=overrides, progress=progress
    )
