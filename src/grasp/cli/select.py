"""grasp select"""

from collections.abc import Callable
from pathlib import Path

import typer

import grasp
from grasp.cli.app import MORE, command
from grasp.cli.options import (
    Art,
    Cautious,
    Diversity,
    EnvironmentPath,
    ProtocolFile,
    Quiet,
    RepeatWorth,
    TargetWeights,
    TrainTokens,
    beside,
)
from grasp.cli.progress import Watch
from grasp.files import check_outputs, check_place
from grasp.text import plain


@command(
    "grasp select art --budget 20% --target sciq --export kept",
    "grasp select art --train-tokens 100B --target sciq=2,openbookqa=1 --out kept.parquet",
    "grasp select art --budget 5000 --by topic --floor 1% --cap Games:20% --out kept.parquet",
    "grasp select art --budget 20% --exclude seen.txt --export kept --documents half --ids-out kept.txt",
)
def select(
    art: Art,
    budget: str | None = typer.Option(
        None,
        "--budget",
        metavar="AMOUNT",
        help="20%, 5000 (rows), 2Mtokens or 300documents, of the whole corpus. Default: the best for --train-tokens.",
    ),
    target: TargetWeights = None,
    train_tokens: TrainTokens = None,
    export: Path | None = typer.Option(
        None,
        "--export",
        metavar="DIR",
        help="New directory for the chosen rows: text, tokens, labels, ready to train on.",
    ),
    out: Path | None = typer.Option(
        None, "--out", metavar="FILE", help="Parquet of row ids, best first; summary and protocol beside it."
    ),
    left_out: Path | None = typer.Option(
        None, "--left-out", metavar="FILE", help="The other rows, worst first, with labels and text: .parquet or .csv."
    ),
    by: str | None = typer.Option(None, "--by", metavar="LABEL", help="Label that floors and caps speak of."),
    floor: list[str] = typer.Option(
        [], "--floor", metavar="[VALUE:]AMOUNT", help="At least so much of the budget, e.g. Games:5%; repeatable."
    ),
    cap: list[str] = typer.Option(
        [], "--cap", metavar="[VALUE:]AMOUNT", help="At most so much of the budget, e.g. 10% of each; repeatable."
    ),
    environment: EnvironmentPath = None,
    exclude: Path | None = typer.Option(
        None,
        "--exclude",
        metavar="FILE",
        help="Row_ids or doc_ids to leave out: text or Parquet.",
        rich_help_panel=MORE,
    ),
    exclude_where: str | None = typer.Option(
        None, "--exclude-where", metavar="EXPR", help="Leave out rows with such labels.", rich_help_panel=MORE
    ),
    form: str = typer.Option(
        "parquet", "--format", help="Of the export: parquet, jsonl or datasets.", rich_help_panel=MORE
    ),
    documents: str | None = typer.Option(
        None,
        "--documents",
        metavar="RULE",
        help="Export whole documents of which any, half or all was chosen. Default: exactly the rows.",
        rich_help_panel=MORE,
    ),
    ids_out: Path | None = typer.Option(
        None, "--ids-out", metavar="FILE", help="List of these documents, one name a line.", rich_help_panel=MORE
    ),
    corpus: str | None = typer.Option(
        None,
        "--corpus",
        metavar="PATH",
        help="Where the corpus lies now. Default: where it was built from.",
        rich_help_panel=MORE,
    ),
    protocol: ProtocolFile = None,
    diversity: Diversity = None,
    repeat_worth: RepeatWorth = 15.4,
    cautious: Cautious = False,
    quiet: Quiet = False,
) -> None:
    """Choose the rows that help the targets most.

    They can be written as a corpus to train on.
    """
    from grasp.choose.selection import check_export

    opened = grasp.open(art)
    artifact = opened.files
    reads = {"--exclude reads": exclude, "--protocol reads": protocol, "is the environment": environment}
    if export is not None:
        check_place(export)
    outputs = {**beside("--out", out), "--left-out": left_out, "--ids-out": ids_out, "--export": export}
    check_outputs(outputs, artifact.reads | reads)
    if export is not None or documents or ids_out or corpus:
        check_export(artifact, export, documents=documents, form=form, corpus=corpus, ids=ids_out)
    with Watch(quiet=quiet) as watch:
        selection = opened.select(
            budget,
            target,
            train_tokens=train_tokens,
            by=by,
            floor=floor,
            cap=cap,
            exclude=exclude,
            exclude_where=exclude_where,
            protocol=protocol,
            diversity=diversity,
            repeat_worth=repeat_worth,
            runs=environment,
            cautious=cautious,
            progress=watch,
        )
    print(selection)
    if out is not None:
        print(f"{selection.save(out)}: rows, best first; beside it {out.stem}.json, for grasp report --selection")
    if left_out is not None:
        print(f"{left_out}: the {selection.write_left_out(left_out):,} rows that are left out, worst first")
    if export is not None:
        say: Callable[[str], None] = lambda line: print(plain(line))  # noqa: E731
        print(selection.export(export, documents=documents, format=form, corpus=corpus, ids=ids_out, say=say))
