"""The verbs: what Python users call, and what every command of the command line calls.

    import grasp
    art = grasp.build("ckpt", "corpus.parquet", ["sciq"], out="art")    # or objects in memory
    art = grasp.open("art")                                             # a path or a URL
    art.score("sciq"), art.predict(drop="topic = 'Games'"), art.select("20%", "sciq").export("kept")
    runs = grasp.open_runs("env")
    grasp.evaluate(art, runs), grasp.calibrate(art, runs).save("protocol.yaml")

A verb gives a result with `.to_pandas()`, `.to_arrow()`, `.write(path)`; printing it shows the answer. Rows are named
by their row_id. The verbs of runs (retrain, open_runs, evaluate, calibrate) live in `grasp.runs.verbs`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grasp.handle import Artifact

if TYPE_CHECKING:
    from grasp.extract.progress import Progress
    from grasp.handle import Place


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
    limit: int | None = None,
    match: str | None = None,
    dtype: str | None = None,
    keep_features: bool | None = None,
    like: "Place | None" = None,
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
        limit=limit,
        match=match,
        dtype=dtype,
        keep_features=keep_features,
        like=like,
        settings=settings,
        resume=resume,
        untrained=untrained,
        progress=progress,
    )
    return Artifact(files)


def merge(parts: "Sequence[Place]", out: "Place", *, progress: "Progress | None" = None) -> Artifact:
    """Write one artifact of the rows of several that have the same model, features, moments and units.

    Args:
        parts: in the order of the rows; all but the first built with `like` the first.
        out: new directory; it appears when it is whole.
    Errors: see `grasp.extract.merge.merge`.
    """
    from grasp.extract.merge import merge

    return Artifact(merge(parts, out, progress=progress))


def open(path: "Place") -> Artifact:  # noqa: A001 - the word that everybody looks for
    """Open an artifact: a directory, or a URL whose files are fetched as they are needed.

    Raises:
        ArtifactError: nothing there, not finished, or damaged.
    """
    return Artifact.open(path)
