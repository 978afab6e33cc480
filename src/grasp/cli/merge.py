"""grasp merge"""

from pathlib import Path

import typer

import grasp
from grasp.cli.app import command
from grasp.cli.options import Quiet
from grasp.cli.progress import Watch


@command(
    "grasp build --model ./ckpt --corpus news --targets sciq --out news-art",
    "grasp build --model ./ckpt --corpus code --targets sciq --like news-art --out code-art",
    "grasp merge news-art code-art --out art",
)
def merge(
    parts: list[str] = typer.Argument(..., metavar="ART", help="Two or more artifacts, in the order of the rows."),
    out: Path = typer.Option(..., "--out", metavar="DIR", help="New directory for the artifact."),
    quiet: Quiet = False,
) -> None:
    """Join artifacts that were built on different sources.

    They must have the same model, features, moments and targets: build the later ones with --like. Texts stay with the
    parts: ask those for explain and select --export.
    """
    with Watch(quiet=quiet) as watch:
        done = grasp.merge(parts, out, progress=watch)
    print(f"{out}: {len(done):,} rows of {len(parts)} parts x {', '.join(done.targets)}")
