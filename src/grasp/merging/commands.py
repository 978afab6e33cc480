"""The command `grasp merge`: parse options, call a function, print the result."""

from pathlib import Path

import typer

import grasp
from grasp.cli.app import command, option
from grasp.progress_display import Watch

commands = typer.Typer()  # the entry point of the group `grasp.commands`


@command(
    "grasp build --model ./ckpt --corpus news --targets sciq --out news-art",
    "grasp build --model ./ckpt --corpus code --targets sciq --like news-art --out code-art",
    "grasp merge news-art code-art --out art",
    group=commands,
)
def merge(
    parts: list[str] = typer.Argument(..., metavar="ART", help="Two or more artifacts, in the order of the rows."),
    out: Path = option("--out DIR", "New directory for the artifact."),
) -> None:
    """Merge artifacts of different sources into one.

    They must have the same model, features, moments and targets: build the later ones with --like. Texts are not
    copied: use the original artifacts for explain and select --export.
    """
    with Watch() as watch:
        artifact = grasp.merge(parts, out, progress=watch)
    print(f"{out}: {len(artifact):,} rows of {len(parts)} artifacts, targets: {', '.join(artifact.targets)}")
