"""The commands `grasp distil` and `grasp apply`: parse options, call a function, print the result."""

from pathlib import Path
from typing import Any

import typer

import grasp
from grasp.cli.app import command, option
from grasp.cli.options import Art
from grasp.progress_display import Watch

commands = typer.Typer()  # the entry point of the group `grasp.commands`
SECTION = "Select training data"  # of `grasp --help`


@command(
    "grasp distil art --target sciq --out scorer",
    "grasp info scorer",
    verb="grasp.distil.distil",
    more="protocol",
    python="seed",
    group=commands,
    section=SECTION,
)
def distil(art: Art, **params: Any) -> None:
    from grasp.distil.distil import distil as fit_scorer

    with Watch() as watch:
        print(fit_scorer(grasp.open(art).files, **params, progress=watch))


@command(
    "grasp apply scorer --corpus crawl.parquet --out scored",
    "grasp apply scorer --corpus s3://bucket/crawl --out scored --keep 20%",
    verb="grasp.distil.apply",
    python="id_column",
    group=commands,
    section=SECTION,
)
def apply(
    scorer: Path = typer.Argument(..., metavar="SCORER", help="Directory written by grasp distil."),
    keep: str | None = option(
        "--keep AMOUNT", "Copy the best documents to DIR/kept: a share (20%) or a number of documents.", None
    ),
    **params: Any,
) -> None:
    from grasp.distil.apply import apply as score_corpus

    with Watch() as watch:
        print(score_corpus(scorer, keep=keep, **params, progress=watch))
