"""grasp report"""

import shlex
import sys
from pathlib import Path

import typer

import grasp
from grasp.cli.app import MORE, command
from grasp.cli.options import Art, EnvironmentPath, ProtocolFile, TargetNames, names
from grasp.files import check_outputs
from grasp.text import size_text

# \b keeps the lines of the epilog as they are.
EXAMPLES = """\b
Examples:
  grasp report art --out report.html
  grasp report art --environment dev --selection kept.json --mixture mixture.json --out report.html
  grasp report art --detect suspects.parquet --out report.html
  grasp report step-3000 --previous step-1000 --previous step-2000 --by topic --out report.html
"""


@command(EXAMPLES)
def report(
    art: Art,
    out: Path = typer.Option(..., "--out", metavar="FILE", help="HTML file to write; it needs no network."),
    by: str | None = typer.Option(
        None, "--by", metavar="LABELS", help="Labels, separated by commas. Default: those of 2 to 100 values."
    ),
    target: TargetNames = None,
    environment: EnvironmentPath = None,
    selection: Path | None = typer.Option(
        None, "--selection", metavar="FILE", help="JSON that grasp select wrote beside its --out."
    ),
    mixture: Path | None = typer.Option(
        None, "--mixture", metavar="FILE", help="JSON that grasp mix wrote beside its --out."
    ),
    suspects: Path | None = typer.Option(
        None, "--detect", metavar="FILE", help="Parquet that grasp detect wrote with --out."
    ),
    protocol: ProtocolFile = None,
    partial: bool = typer.Option(
        False, "--partial", help="Use what an unfinished environment has.", rich_help_panel=MORE
    ),
    previous: list[str] = typer.Option(
        [],
        "--previous",
        metavar="ART",
        help="Artifact of an earlier checkpoint on the same corpus, oldest first; repeatable.",
        rich_help_panel=MORE,
    ),
) -> None:
    """Write one HTML page of findings, with a live what-if.

    Slices with intervals, interactions, rows with their text, sliders that predict what grasp predict predicts.
    """
    artifact = grasp.open(art)
    read = {"--selection reads": selection, "--mixture reads": mixture, "--detect reads": suspects}
    check_outputs({"--out": out}, artifact.files.reads | read | {"--protocol reads": protocol})
    page = artifact.report(
        out,
        by=names(by) or (),
        target=names(target),
        protocol=protocol,
        runs=environment,
        partial=partial,
        selection=selection,
        mixture=mixture,
        suspects=suspects,
        previous=previous,
        command=shlex.join(["grasp", *sys.argv[1:]]),
    )
    print(f"{page}: {size_text(page.stat().st_size)}; open it in any browser, it needs no network")
