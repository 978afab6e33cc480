"""The verbs: what Python users call, and what every command of the command line calls.

    import grasp
    art = grasp.build("ckpt", "corpus.parquet", ["sciq"], out="art")    # or objects in memory
    art = grasp.open("art")                                             # a path or a URL
    art.score("sciq"), art.predict(drop="topic = 'Games'"), art.select("20%", "sciq").export("kept")
    runs = grasp.open_runs("env")
    grasp.evaluate(art, runs), grasp.calibrate(art, runs).save("protocol.yaml")

A verb gives a result with `.to_pandas()`, `.to_arrow()`, `.write(path)`; printing it shows the answer. Rows are named
by their row_id.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grasp.handle import Artifact

if TYPE_CHECKING:
    from grasp.extract.progress import Progress
    from grasp.handle import Place, Protocol
    from grasp.runs.candidates import ProtocolFamily
    from grasp.runs.configured import ConfiguredMethod
    from grasp.runs.environment import Environment
    from grasp.runs.retrain import RetrainStatus
    from grasp.runs.verbs import Calibration, Evaluation


def build(
    model: Any = None,
    corpus: Any = None,
    targets: Any = None,
    out: "Place" = "",
    *,
    tokenizer: Any = None,
    split: str | None = None,
    text_column: str | None = None,
    id_column: str | None = None,
    max_length: int | None = None,
    match: str | None = None,
    dtype: str | None = None,
    keep_features: bool | None = None,
    settings: "Mapping[str, Any] | Place | None" = None,
    resume: bool = False,
    untrained: bool = False,
    progress: "Progress | None" = None,
) -> "Artifact":
    """Run the model once over the corpus and write the artifact `out`; what is there already is not done again.

    Args:
        model: checkpoint (directory or hub name), or a transformers model with its `tokenizer`.
        corpus: file, directory, URL or hub name; or a DataFrame, an Arrow table, a `datasets.Dataset`.
        targets: tasks and files of units; or units: dicts of prompt and completion (or question and answer).
    The other arguments, and errors: see `grasp.extract.build.build`.
    """
    from grasp.extract.build import build

    files = build(
        model,
        corpus,
        targets,
        out,
        tokenizer=tokenizer,
        split=split,
        text_column=text_column,
        id_column=id_column,
        max_length=max_length,
        match=match,
        dtype=dtype,
        keep_features=keep_features,
        settings=settings,
        resume=resume,
        untrained=untrained,
        progress=progress,
    )
    return Artifact(files)


def open(path: "Place") -> Artifact:  # noqa: A001 - the word that everybody looks for
    """Open an artifact: a directory, or a URL whose files are fetched as they are needed.

    Raises:
        ArtifactError: nothing there, not finished, or damaged.
    """
    return Artifact.open(path)


def open_runs(path: "Place") -> "Environment":
    """Open an environment: models retrained on parts of a corpus, and how well each did.

    Raises:
        EnvironmentDataError: nothing there, or damaged.
    """
    from grasp.runs.environment import Environment

    return Environment.open(Path(path))


def evaluate(
    art: Artifact,
    runs: "Environment | Place",
    *,
    protocol: "Protocol" = None,
    targets: Sequence[str] | None = None,
    methods: "Sequence[ConfiguredMethod]" = (),
    controls: bool = False,
    development: "Sequence[Environment | Place]" = (),
    family: "ProtocolFamily | Path | None" = None,
    predictions: "Sequence[Place]" = (),
    oracles: Sequence[str] = (),
    checkpoints: "Sequence[Place]" = (),
    cache: "Place | None" = None,
    partial: bool = False,
    resamples: int = 1_000,
    progress: "Progress | None" = None,
) -> "Evaluation":
    """Compare predictions with retraining, method by method. See `grasp.runs.verbs.evaluate`."""
    from grasp.runs.environment import as_runs
    from grasp.runs.verbs import evaluate

    return evaluate(
        art.files,
        as_runs(runs),
        protocol=Path(protocol) if isinstance(protocol, str) else protocol,
        targets=targets,
        methods=methods,
        controls=controls,
        development=[as_runs(one) for one in development],
        family=family,
        predictions=[Path(place) for place in predictions],
        oracles=oracles,
        checkpoints=[Path(place) for place in checkpoints],
        cache=None if cache is None else Path(cache),
        partial=partial,
        resamples=resamples,
        progress=progress,
    )


def calibrate(
    arts: Artifact | Sequence[Artifact],
    runs: "Environment | Place | Sequence[Environment | Place]",
    *,
    family: "ProtocolFamily | Path | None" = None,
    targets: Sequence[str] | None = None,
    delta: float = 0.05,
    resamples: int = 1_000,
    name: str = "calibrated",
) -> "Calibration":
    """Choose a protocol on development runs; `.protocol`, or `.save(path)`. See `grasp.runs.verbs.calibrate`."""
    from grasp.runs.environment import Environment, as_runs
    from grasp.runs.verbs import calibrate

    return calibrate(
        [art.files for art in ([arts] if isinstance(arts, Artifact) else arts)],
        [as_runs(one) for one in ([runs] if isinstance(runs, Environment | Path | str) else runs)],
        family=family,
        targets=targets,
        delta=delta,
        resamples=resamples,
        name=name,
    )


def retrain(
    corpus: "Place | None" = None,
    targets: Sequence[str] | None = None,
    *,
    out: "Place",
    family: str | None = None,
    count: int | None = None,
    seeds: int | None = None,
    recipe: str | None = None,
    role: str | None = None,
    settings: Mapping[str, Any] | None = None,
    progress: "Callable[[RetrainStatus], None] | None" = None,
) -> "Environment":
    """Train a model on each of many subsets and score it, or go on with what was begun in `out`.

    Args:
        corpus: file, directory or URL.
        targets: tasks and files of units.
        family: how subsets are drawn, e.g. mixture:topic; `count` of them, each trained with so many `seeds`.
        recipe: model and training: tiny, small or paper-50m.
        role: dev: protocols may be chosen on it; held-out: only judged.
        settings: any other settings, nested; arguments win.
    Raises:
        GraspError: bad input, named, before anything is trained. No finished run is lost.
    """
    from grasp.dotted import put
    from grasp.runs.retrain import retrain
    from grasp.settings import retrain_settings

    data = deepcopy(dict(settings or {}))
    arguments = {
        "corpus.path": None if corpus is None else str(corpus),
        "targets.names": None if targets is None else [targets] if isinstance(targets, str) else list(targets),
        "family": family,
        "n_subsets": count,
        "seeds": None if seeds is None else list(range(seeds)),
        "recipe": recipe,
        "role": role,
    }
    for name, value in arguments.items():
        if value is not None:
            put(data, name, value)
    return retrain(retrain_settings(data), Path(out), progress)
