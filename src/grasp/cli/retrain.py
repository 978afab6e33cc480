"""grasp retrain"""

from pathlib import Path

import typer

import grasp
from grasp.cli.app import MORE, command
from grasp.cli.console import tell
from grasp.cli.options import Address, Assignments, ConfigFile, Quiet, cluster, merged, names
from grasp.cli.progress import Watch


@command(
    "grasp retrain --corpus corpus.parquet --targets sciq --family mixture:topic --out env",
    "grasp retrain --like art --family mixture:topic --out env",
    "grasp retrain --out env --resume -B 64",
    "grasp retrain --like art --train-command 'python train.py --data {corpus} --out {checkpoint}' --out env",
    "grasp retrain --out env --resume --engine ray --workers 16 --address auto",
)
def retrain(
    out: Path = typer.Option(
        ..., "--out", metavar="DIR", help="Directory of the environment; several processes may share it."
    ),
    corpus: str | None = typer.Option(
        None, "--corpus", metavar="PATH", help="Parquet, JSONL(.gz/.zst), a directory, or a URL."
    ),
    targets: str | None = typer.Option(
        None, "--targets", metavar="NAMES", help="Tasks or JSONL files, separated by commas."
    ),
    like: str | None = typer.Option(
        None, "--like", metavar="ART", help="Corpus, targets and tokenizer of this artifact: runs to judge it by."
    ),
    recipe: str | None = typer.Option(
        None, "--recipe", metavar="NAME", help="Model and training: tiny, small or paper-50m. Default: tiny."
    ),
    family: str | None = typer.Option(
        None, "--family", metavar="FAMILY", help="How subsets are drawn. Default: mixture:topic."
    ),
    count: int | None = typer.Option(
        None, "-B", min=1, metavar="N", help="Subsets. Default: 24. More may be added to the same --out later."
    ),
    seeds: int | None = typer.Option(
        None, "--seeds", min=1, metavar="N", help="Trainings of each subset; two or more show the noise. Default: 2."
    ),
    role: str | None = typer.Option(
        None, "--role", metavar="ROLE", help="dev: protocols may be chosen on it. held-out: only judged. Default: dev."
    ),
    resume: bool = typer.Option(False, "--resume", help="Go on with the settings of the run.yaml that is there."),
    config: ConfigFile = None,
    text_column: str | None = typer.Option(
        None, "--text-column", metavar="NAME", help="Column with the text. Default: text.", rich_help_panel=MORE
    ),
    id_column: str | None = typer.Option(
        None, "--id-column", metavar="NAME", help="Column that names rows. Default: row_id or id.", rich_help_panel=MORE
    ),
    assign: Assignments = [],
    workers: int | None = typer.Option(
        None,
        "--workers",
        min=1,
        metavar="N",
        help="Processes that train. Default: one; on a cluster, one for each GPU or core.",
        rich_help_panel=MORE,
    ),
    train_command: str | None = typer.Option(
        None,
        "--train-command",
        metavar="COMMAND",
        help="Your own trainer: reads {corpus} (JSON lines), draws by {seed}, leaves {checkpoint}.",
        rich_help_panel=MORE,
    ),
    print_jobs: bool = typer.Option(
        False,
        "--print-jobs",
        help="Score what earlier jobs left; print a shell line for each run of --train-command that is left.",
        rich_help_panel=MORE,
    ),
    stack: int | None = typer.Option(
        None, "--stack", min=1, metavar="N", help="Models that a worker trains as one program.", rich_help_panel=MORE
    ),
    engine: str = typer.Option(
        "local",
        "--engine",
        metavar="NAME",
        help="local: processes here; ray: of a Ray cluster whose nodes all reach --out.",
        rich_help_panel=MORE,
    ),
    address: Address = None,
    quiet: Quiet = False,
) -> None:
    """Train a model on each of many subsets, and score it.

    Says first what it will cost. What is finished is never trained again: the same command, or --resume, goes on after
    a kill, and adds subsets or seeds.
    """
    settings = merged(config or {}, assign, {}) if config or assign else None
    spec = cluster(engine, workers, address, None)
    with Watch(quiet=quiet) as watch:
        environment = grasp.retrain(
            corpus,
            names(targets),
            out=out,
            like=like,
            text_column=text_column,
            id_column=id_column,
            family=family,
            count=count,
            seeds=seeds,
            recipe=recipe,
            train_command=train_command,
            jobs=print if print_jobs else None,
            role=role,
            workers=workers,
            stack=stack,
            settings=settings,
            resume=resume,
            cluster=spec,
            progress=watch.runs,
        )
    if not (print_jobs and environment.pending()):  # lines are for a scheduler: nothing else on standard output
        tell(environment.summary())
