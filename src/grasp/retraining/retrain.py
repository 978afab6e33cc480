"""Train a model on each of many subsets of the corpus: the function `retrain` behind `grasp.retrain`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grasp.artifact.label_table import LabelTable
from grasp.artifact.manifest import ADDED_TARGETS
from grasp.artifact.reader import ArtifactReader, Opened
from grasp.errors import SubsetError
from grasp.models.build_source import BuildSource
from grasp.pipeline.ray_cluster import ClusterSpec
from grasp.predict.families import parse_family
from grasp.progress import RetrainStatus
from grasp.retraining.settings import RetrainSettings, retrain_settings
from grasp.runs.retrained import RetrainedRuns
from grasp.runs.table import Place
from grasp.settings import form_of_loss, without_foreign_code
from grasp.yaml_files import get_setting, override_settings, plain_settings, read_yaml, require_flags, set_settings

REQUIRED = {"--corpus": "corpus.path", "--targets": "targets.names"}


def retrain(
    corpus: str | Path | None = None,
    targets: str | Sequence[str] | None = None,
    *,
    out: Place,
    like: "Opened | str | Path | None" = None,
    recipe: str | Path | Mapping[str, Any] | None = None,
    train: str | None = None,
    model: str | Path | None = None,
    loss: str | None = None,
    family: str | None = None,
    count: int | None = None,
    seeds: int | None = None,
    role: str | None = None,
    resume: bool = False,
    settings: Mapping[str, Any] | Place | None = None,
    text_column: str | None = None,
    id_column: str | None = None,
    workers: int | None = None,
    train_command: str | None = None,
    jobs: "Callable[[str], None] | None" = None,
    cluster: ClusterSpec | None = None,
    progress: Callable[[RetrainStatus], None] | None = None,
) -> RetrainedRuns:
    """Train a model on each of many subsets of the corpus, and evaluate it.

    The estimated cost is reported after the first steps. Finished runs are never trained again: the same command, or
    `resume`, continues after an interruption, and adds subsets or seeds.

    Args:
        corpus: Parquet, JSONL(.gz/.zst), a directory, or a URL.
        targets: tasks or JSONL files, separated by commas. In Python a list or a single name.
        out: directory of the runs; several processes may share it.
        like: artifact whose corpus, targets and tokenizer are used, so that the runs can evaluate it.
        recipe: model and training settings: tiny, small or paper-50m. With --train further a YAML or JSON file with the
            names of TrainingArguments, SFTConfig, DPOConfig or Axolotl. Default: tiny; with --train further, 3 epochs
            in batches of 8.
        train: whether to train models from scratch (new), or to fine-tune a model on each subset (further).
            Default: new.
        model: checkpoint to train further: a directory or a hub name. Default: that of `like`.
        loss: loss of the training: tokens; or, with --train further, dpo for preference pairs with chosen and rejected
            answers.
        family: distribution of the subsets. Default: mixture:topic.
        count: number of subsets. Default: 24. More can be added to the same `out` later.
        seeds: training runs of each subset; two or more are required to estimate the noise. Default: 2.
        role: purpose of the runs. dev: protocols may be selected on them; held-out: evaluation only. Default: dev.
        resume: continue with the settings of run.yaml in `out`.
        settings: other settings, nested, or a YAML file with them; arguments take precedence.
        text_column: column with the text. Default: text.
        id_column: column with row names. Default: row_id or id.
        workers: number of training processes. Default: one; on a cluster, one per GPU or core.
        train_command: your own training command: reads {corpus} (JSON lines), uses {seed}, writes {checkpoint}. Failed
            runs are retried by the next call.
        jobs: callback that receives one shell line per run, for a scheduler, instead of training; the next call
            evaluates the checkpoints that these lines wrote.
        cluster: Ray workers for training; all must have access to `out`.
        progress: callback that receives every stage and step.
    Returns:
        The retrained runs.
    Raises:
        GraspError: invalid input, before any training. Finished runs are never lost.
    """
    from grasp.retraining.worker import retrain  # noqa: PLC0415 - brings torch

    data = plain_settings(settings)
    arguments = {
        "corpus.path": None if corpus is None else str(corpus),
        "corpus.text_column": text_column,
        "corpus.row_id_column": id_column,
        "targets.names": [targets] if isinstance(targets, str) else targets and list(targets),
        "family": family,
        "n_subsets": count,
        "seeds": None if seeds is None else list(range(seeds)),
        "recipe": None if train == "further" else recipe,
        "train": train,
        "model.path": None if model is None else str(model),
        "corpus.form": form_of_loss(loss),
        "train_command": train_command,
        "role": role,
        "workers": workers,
    }
    set_settings(data, arguments)
    if train == "further" and recipe is not None:
        fields = recipe if isinstance(recipe, Mapping) else read_yaml(Path(recipe))
        data["fine_tuning"] = {**fields, **data.get("fine_tuning", {})}
    if like is not None:
        data = override_settings(_settings_of_artifact(like, data), data)
    recorded = Path(out) / "run.yaml"
    if resume and recorded.exists():
        data = override_settings(without_foreign_code(read_yaml(recorded), str(recorded), data), data)
    nothing_to_resume = resume and not recorded.exists()
    require_flags(data, REQUIRED, f"retrain --resume: there is no {recorded}" if nothing_to_resume else "retrain")
    return retrain(retrain_settings(data), Path(out), progress, cluster=cluster, jobs=jobs)


def _settings_of_artifact(art: Opened | str | Path, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with which retrained models use the same rows and units as an artifact."""
    files = ArtifactReader.open(art) if isinstance(art, Path | str) else art.files
    source = BuildSource(files)
    files.require_texts("only language models can be retrained")
    if get_setting(data, "corpus.path") is None and get_setting(data, "subsets") is None:
        default = RetrainSettings.model_fields["family"].default
        label = parse_family(get_setting(data, "family") or default).label
        if label is not None and label not in files.manifest.details.get("labels", []):
            try:
                LabelTable(files.rows_path).column(label, "family")  # valid if it is an expression
            except SubsetError as err:
                raise SubsetError(f"{files.location}: {err}") from err
    if get_setting(data, "corpus.path") is None:
        source.require_corpus_here("--corpus")
    _ = source.tokenizer  # raises if it is missing or has changed
    model, built = source.settings.model, source.settings.model_dump(mode="json", include={"corpus", "targets"})
    built["targets"]["names"] += files.manifest.details.get(ADDED_TARGETS, [])
    if data.get("train") == "further":
        return built | {
            "model": source.start_settings.model_dump(mode="json", include={"path", "tokenizer", "adapter"})
        }
    shape = {"vocab_size": files.manifest.details["vocab_size"], "context": source.settings.corpus.max_length}
    return built | {"tokenizer": model.tokenizer or model.path, "overrides": {"shape": shape}}
