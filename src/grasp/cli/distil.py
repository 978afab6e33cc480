"""grasp distil, grasp apply"""

from pathlib import Path

import typer

import grasp
from grasp.cli.app import MORE, command
from grasp.cli.options import Art, IdColumn, OnlyTarget, ProtocolFile, Quiet, Split, TextColumn
from grasp.cli.progress import Watch


@command(
    "grasp distil art --target sciq --out scorer",
    "grasp info scorer",
)
def distil(
    art: Art,
    target: OnlyTarget = None,
    out: Path = typer.Option(..., "--out", metavar="DIR", help="New directory for the scorer."),
    rows: int | None = typer.Option(
        None,
        "--rows",
        metavar="N",
        help="Learn from so many rows, drawn at random: 10,000 take a minute. Default: all, up to 12 MB of text.",
    ),
    protocol: ProtocolFile = None,
    seed: int = typer.Option(0, "--seed", help="Of the draw and of the folds.", rich_help_panel=MORE),
    quiet: Quiet = False,
) -> None:
    """Learn to score text alone, for corpora that no model reads.

    The scorer guesses a row's relevance from its spelling. It says how well it does on rows that it has not seen.
    """
    with Watch(quiet=quiet) as watch:
        result = grasp.open(art).distil(target, out, protocol=protocol, rows=rows, seed=seed, progress=watch)
    print(result)


@command(
    "grasp apply scorer --corpus crawl.parquet --out scored",
    "grasp apply scorer --corpus s3://bucket/crawl --out scored --workers 16 --keep 20%",
)
def apply(
    scorer: Path = typer.Argument(..., metavar="SCORER", help="Directory that grasp distil wrote."),
    corpus: str = typer.Option(..., "--corpus", metavar="PATH", help="Parquet, JSONL, a directory or a URL of either."),
    out: Path = typer.Option(..., "--out", metavar="DIR", help="Directory for the scores; the same again goes on."),
    keep: str | None = typer.Option(
        None, "--keep", metavar="AMOUNT", help="Copy the best documents to DIR/kept: 20%, or a number of them."
    ),
    workers: int = typer.Option(1, "--workers", metavar="N", help="Processes that share the files of the corpus."),
    text_column: TextColumn = None,
    id_column: IdColumn = None,
    split: Split = None,
    quiet: Quiet = False,
) -> None:
    """Score every document of a corpus with a scorer, without a model.

    Writes Parquet with the documents' names and scores: standard deviations of relevance, 0 is the average row that
    the scorer learned from. A run that was cut off goes on when it is started again.
    """
    with Watch(quiet=quiet) as watch:
        result = grasp.apply(
            scorer,
            corpus,
            out,
            keep=keep,
            split=split,
            text_column=text_column,
            id_column=id_column,
            workers=workers,
            progress=watch,
        )
    print(result)
