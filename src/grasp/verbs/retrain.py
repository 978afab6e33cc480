"""Runs, made by training a model on each of many subsets: the verb `retrain`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from grasp.artifact.reader import ArtifactReader
from grasp.errors import SettingsError, SubsetError
from grasp.extract.cluster import ClusterSpec
from grasp.extract.reopen import BuildSource
from grasp.predict.families import parse_family
from grasp.runs.environment import Environment
from grasp.runs.table import RunTable
from grasp.settings import RetrainSettings, retrain_settings, without_foreign_code
from grasp.yaml_files import leaf, over, plain_settings, put_all, read_yaml, require_flags

if TYPE_CHECKING:
    from grasp.training.retrain import RetrainStatus


Place = Path | str
Runs = Environment | RunTable | Place
REQUIRED = {"--corpus": ("corpus.path",), "--targets": ("targets.names", "targets.datasets")}


class Opened(Protocol):
    """An artifact in the hand, a `grasp.Artifact`."""

    @property
    def files(self) -> ArtifactReader: ...


def retrain(
    corpus: Place | None = None,
    targets: str | Sequence[str] | None = None,
    *,
    out: Place,
    like: "Opened | Place | None" = None,
    text_column: str | None = None,
    id_column: str | None = None,
    family: str | None = None,
    count: int | None = None,
    seeds: int | None = None,
    recipe: str | None = None,
    train_command: str | None = None,
    jobs: "Callable[[str], None] | None" = None,
    role: str | None = None,
    workers: int | None = None,
    stack: int | None = None,
    settings: Mapping[str, Any] | Place | None = None,
    resume: bool = False,
    cluster: ClusterSpec | None = None,
    progress: "Callable[[RetrainStatus], None] | None" = None,
) -> Environment:
    """Train a model on each of many subsets and score it, or go on with what was begun in `out`.

    Args:
        corpus: file, directory or URL.
        targets: tasks and files of units.
        like: an artifact whose corpus, targets and tokenizer are taken, so that it can be compared with these runs.
        text_column: column of the texts; by default `text`.
        id_column: column of the names; by default `row_id` or `id`.
        family: how subsets are drawn, e.g. mixture:topic; `count` of them, each trained with so many `seeds`.
        recipe: model and training: tiny, small or paper-50m.
        train_command: your own trainer instead, with {corpus}, {checkpoint} and {seed} to be filled in; a run of which
            it fails is marked, and tried again by the next call.
        jobs: told a shell line for each run instead of training it, for a scheduler; the next call scores what the
            lines have left.
        role: dev: protocols may be chosen on it; held-out: only judged.
        workers: processes that train; `stack` models of each as one program.
        settings: any other settings, nested, or the YAML file of them; arguments win.
        resume: take the settings from the `run.yaml` in `out`.
        cluster: Ray workers that train; all must reach `out`.
        progress: told of every stage and step.
    Raises:
        GraspError: bad input, named, before anything is trained. No finished run is lost.
    """
    from grasp.training.retrain import retrain  # noqa: PLC0415 - brings torch

    data = plain_settings(settings)
    arguments = {
        "corpus.path": None if corpus is None else str(corpus),
        "corpus.text_column": text_column,
        "corpus.row_id_column": id_column,
        "targets.names": [targets] if isinstance(targets, str) else targets and list(targets),
        "family": family,
        "n_subsets": count,
        "seeds": None if seeds is None else list(range(seeds)),
        "recipe": recipe,
        "train_command": train_command,
        "role": role,
        "workers": workers,
        "stack": stack,
    }
    put_all(data, arguments)
    if like is not None:
        data = over(_like(like, data), data)
    begun = Path(out) / "run.yaml"
    if resume and begun.exists():
        data = over(without_foreign_code(read_yaml(begun), str(begun), data), data)
    fresh = not resume or begun.exists()
    require_flags(data, REQUIRED, "retrain" if fresh else f"retrain --resume: there is no {begun}")
    return retrain(retrain_settings(data), Path(out), progress, cluster=cluster, jobs=jobs)


def _like(art: Opened | Place, data: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under which retrained models read the same rows and units as the artifact's model did."""
    files = ArtifactReader.open(art) if isinstance(art, Path | str) else art.files
    origin = BuildSource(files)
    if origin.has_images:
        raise SettingsError(f"like: {files.where} was built from images, and what is retrained are language models")
    if leaf(data, "corpus.path") is None and leaf(data, "subsets") is None:
        default = RetrainSettings.model_fields["family"].default
        label, labels = parse_family(leaf(data, "family") or default).label, files.manifest.details.get("labels", [])
        if label is not None and label not in labels:
            raise SubsetError(f"family: {files.where} has no label {label!r}, expected one of {labels}")
    if leaf(data, "corpus.path") is None:
        origin.require_corpus_here("--corpus")
    _ = origin.tokenizer  # still there, and its own
    model, built = origin.settings.model, origin.settings.model_dump(mode="json", include={"corpus", "targets"})
    shape = {"vocab_size": files.manifest.detail("vocab_size"), "context": origin.settings.corpus.max_length}
    return built | {"tokenizer": model.tokenizer or model.path, "overrides": {"shape": shape}}
