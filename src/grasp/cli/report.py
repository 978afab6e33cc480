"""grasp report"""

import shlex
import sys
from pathlib import Path

import typer

import grasp
from grasp.cli.app import MORE, command
from grasp.cli.options import Art, EnvironmentPath, Partial, ProtocolFile, TargetNames, names
from grasp.errors import SettingsError
from grasp.files import check_outputs
from grasp.report import EXPLAINED
from grasp.text import size_text


@command(
    "grasp report art --out report.html",
    "grasp report art --environment dev --selection kept.json --mixture mixture.json --out report.html",
    "grasp report art --detect suspects.parquet --out report.html",
    "grasp report art --atlas map",
    "grasp report step-3000 --previous step-1000 --previous step-2000 --by topic --out report.html",
)
def report(
    art: Art,
    out: Path | None = typer.Option(None, "--out", metavar="FILE", help="HTML file to write; it needs no network."),
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
    atlas: Path | None = typer.Option(
        None, "--atlas", metavar="DIR", help="Write the rows as a map that Embedding Atlas opens."
    ),
    protocol: ProtocolFile = None,
    explain: int = typer.Option(
        EXPLAINED,
        "--explain",
        metavar="N",
        min=0,
        help="Best rows of each target whose words are shaded, if the model is at hand.",
        rich_help_panel=MORE,
    ),
    partial: Partial = False,
    previous: list[str] = typer.Option(
        [],
        "--previous",
        metavar="ART",
        help="Artifact of an earlier checkpoint on the same corpus, oldest first; repeatable.",
        rich_help_panel=MORE,
    ),
) -> None:
    """Write one HTML page: what to keep, and what it is worth.

    It says how far to trust that, shows the rows that teach each target, and predicts while sliders move.
    """
    artifact = grasp.open(art)
    if out is None and atlas is None:
        raise SettingsError("report: got neither --out nor --atlas; name the file of the page, or a directory, or both")
    read = {"--selection reads": selection, "--mixture reads": mixture, "--detect reads": suspects}
    check_outputs({"--out": out}, artifact.files.reads | read | {"--protocol reads": protocol})
    if atlas is not None:
        from grasp.predict.protocol import as_protocol
        from grasp.report.atlas import write_atlas

        opens = write_atlas(artifact.files, atlas, protocol=as_protocol(protocol), targets=names(target))
        print(f"{atlas}: the rows as a map; pip install embedding-atlas, then\n  {opens}")
    if out is None:
        return
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
        explain=explain,
        command=shlex.join(["grasp", *sys.argv[1:]]),
    )
    print(f"{page}: {size_text(page.stat().st_size)}; open it in any browser, it needs no network")
