"""grasp build"""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from grasp.cli.app import MORE, command
from grasp.cli.options import Address, Assignments, ConfigFile, IdColumn, Quiet, Split, TextColumn, cluster, merged
from grasp.cli.progress import Watch
from grasp.dotted import leaf
from grasp.errors import SettingsError
from grasp.text import size_text, skipped_text

if TYPE_CHECKING:
    from grasp.artifact.inspection import ArtifactInfo


@command(
    "grasp build --model ./ckpt --corpus corpus.parquet --targets sciq,openbookqa --out art",
    "grasp build --model gpt2 --corpus posts.jsonl --text-column body --targets exam.jsonl --out art",
    "grasp build --model ./chat-model --corpus chats.jsonl --targets held-out-chats.jsonl --out art",
    "grasp build --resume --out art",
    "grasp build --config art/run.yaml --out s3://bucket/art",
    "grasp build --model ./vit --set model.classifier.head=classifier --corpus images.parquet \\\n"
    "            --targets trusted.parquet --out art",
)
def build(
    out: str = typer.Option(
        ..., "--out", metavar="DIR", help="Directory for the artifact, or a URL such as s3://bucket/art."
    ),
    model: str | None = typer.Option(
        None, "--model", metavar="DIR", help="Checkpoint that reads the corpus: a directory or a hub name."
    ),
    corpus: str | None = typer.Option(
        None,
        "--corpus",
        metavar="FILE",
        help="Texts, conversations or token ids: Parquet, JSONL, a directory of them, a `datasets` directory, a hub "
        "name or a URL.",
    ),
    targets: list[str] = typer.Option(
        [],
        "--targets",
        metavar="NAMES",
        help="What the model should do well: tasks (sciq, ...) or files of questions (exam.jsonl), separated by "
        "commas; repeatable.",
    ),
    text_column: TextColumn = None,
    id_column: IdColumn = None,
    split: Split = None,
    max_length: int | None = typer.Option(
        None,
        "--max-length",
        metavar="N",
        help="Tokens of the longest row; longer documents become several. Default: what the model reads, at most 2048.",
    ),
    limit: int | None = typer.Option(
        None, "--limit", min=1, metavar="N", help="Read only the first N documents, for a quick look."
    ),
    resume: bool = typer.Option(
        False, "--resume", help="Go on with a build that was cut off, with its settings.", rich_help_panel=MORE
    ),
    untrained: bool = typer.Option(
        False, "--untrained", help="Go on although the model predicts no better than chance.", rich_help_panel=MORE
    ),
    tokenizer: str | None = typer.Option(
        None,
        "--tokenizer",
        metavar="DIR",
        help="The model's tokenizer. Default: the one in its directory.",
        rich_help_panel=MORE,
    ),
    add_target: str | None = typer.Option(
        None, "--add-target", metavar="NAMES", help="Add targets to a finished artifact.", rich_help_panel=MORE
    ),
    keep_features: bool | None = typer.Option(
        None,
        "--keep-features/--no-keep-features",
        help="Keep what --add-target needs, so that it runs no model; 2 to 6 kB a token.",
        rich_help_panel=MORE,
    ),
    like: str | None = typer.Option(
        None,
        "--like",
        metavar="ART",
        help="Take the moments of this artifact, so that grasp merge can join the two.",
        rich_help_panel=MORE,
    ),
    match: str | None = typer.Option(
        None,
        "--match",
        metavar="KIND",
        help="How rows are compared with answers: pooled, token or both. Default: both.",
        rich_help_panel=MORE,
    ),
    dtype: str | None = typer.Option(
        None,
        "--dtype",
        metavar="TYPE",
        help="float32, bfloat16 or float16. Default: float32 on a CPU, else bfloat16.",
        rich_help_panel=MORE,
    ),
    config: ConfigFile = None,
    assign: Assignments = [],
    engine: str = typer.Option(
        "local", "--engine", metavar="KIND", help="local: this process; ray: a Ray cluster.", rich_help_panel=MORE
    ),
    workers: int | None = typer.Option(
        None,
        "--workers",
        min=1,
        metavar="N",
        help="Workers of the cluster. Default: one for each GPU, or each core where it has none.",
        rich_help_panel=MORE,
    ),
    address: Address = None,
    quiet: Quiet = False,
) -> None:
    """Run a model once over a corpus and write an artifact.

    The same command goes on where it was cut off.

    The model is a causal LM, or an image classifier if its output layer is named: --set model.classifier.head=NAME.
    """
    from grasp.extract.build import add_targets, split_names
    from grasp.extract.build import build as run

    flags = {
        "model.path": model,
        "model.tokenizer": tokenizer,
        "model.dtype": dtype,
        "corpus.path": corpus,
        "corpus.split": split,
        "corpus.text_column": text_column,
        "corpus.row_id_column": id_column,
        "corpus.max_length": max_length,
        "corpus.limit": limit,
        "targets.names": [name for text in targets for name in split_names(text)] or None,
        "features.match": match,
        "keep_features": keep_features,
        "like": like,
    }
    data = merged(config, assign, flags)
    if add_target is not None:
        idle = {"--engine": engine != "local", "--workers": workers, "--address": address, "--resume": resume}
        _refuse_idle(idle | {"--untrained": untrained}, "--add-target, which runs in this process on what is finished")
        with Watch(quiet=quiet) as watch:
            source = add_targets(out, add_target, settings=data, progress=watch)
        _say_added(out, add_target, source)
        return
    if engine == "local":
        _refuse_idle({"--workers": workers}, "--engine local; say --engine ray")
    spec = cluster(engine, workers, address, leaf(data, "model.threads"))
    with Watch(quiet=quiet) as watch:
        artifact = run(out=out, settings=data, resume=resume, untrained=untrained, cluster=spec, progress=watch)
    _say(out, artifact.path)


def _refuse_idle(flags: dict[str, Any], beside: str) -> None:
    given = [flag for flag, value in flags.items() if value]
    if given:
        raise SettingsError(f"{', '.join(given)}: no meaning with {beside}; leave it out")


def _say(out: str, path: Path) -> None:
    """What was built and what to do with it."""
    from grasp.artifact.inspection import info
    from grasp.artifact.remote import remote_url

    done: ArtifactInfo = info(remote_url(out) or path)
    units = sum(done.targets.values())
    print(
        f"{out}: {done.n_rows:,} rows x {units:,} units ({', '.join(done.targets)}), "
        f"{size_text(done.bytes_total)}, {done.bytes_per_row:,.0f} bytes a row"
    )
    if done.skipped["rows"]["counts"]:
        print(f"left out: {skipped_text(done.skipped['rows']['counts'])} (listed in {out}/manifest.json)")
    score = ["grasp", "score", out, "--target", next(iter(done.targets)), "--top", "10", "--min-tokens", "32"]
    print(f"next: {shlex.join(score)}")


def _say_added(out: str, added: str, source: str) -> None:
    from grasp.artifact.reader import ArtifactReader

    done = {
        "kept features": f"added {added} from the features that were kept",
        "pass": f"added {added} by a pass over the corpus",
        "there already": f"{added} is there already, with the same units; nothing was done",
    }
    print(f"{out}: {done[source]}; targets now: {', '.join(ArtifactReader.open(out).targets)}")
