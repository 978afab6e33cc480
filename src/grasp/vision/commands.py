"""The command `grasp detect`: parse options, call a function, print the result."""

from pathlib import Path
from typing import Any

import typer

import grasp
from grasp.cli.app import command, option
from grasp.cli.console import check_outputs
from grasp.cli.options import Art
from grasp.progress_display import Watch

commands = typer.Typer()  # the entry point of the group `grasp.commands`


@command(
    "grasp detect art --target trusted --top 20 --out suspects.parquet",
    "grasp detect art --target trusted --out suspects.html",
    verb="grasp.vision.detect",
    group=commands,
    section="Find suspicious rows",
    more="match",
)
def detect(
    art: Art,
    out: Path | None = option("--out FILE", "Write the table as .parquet or .csv, or the first rows as .html.", None),
    **params: Any,
) -> None:
    artifact = grasp.open(art).files
    is_page = out is not None and out.suffix == ".html"
    check_outputs({"--out": out}, artifact=artifact, tables=[] if is_page else ["--out"])
    from grasp.vision.detect import detect as find_suspects

    with Watch() as watch:
        suspects = find_suspects(artifact, **params, progress=watch)
    print(suspects)
    if out is not None:
        print(f"{suspects.write(out)}: {len(suspects):,} rows")
