"""grasp explain"""

import sys
from html import escape
from pathlib import Path

import typer

import grasp
from grasp.cli.app import command
from grasp.cli.console import PlainStream, in_colour, tell
from grasp.cli.options import Art, JsonFile, Kernel, OnlyTarget, OwnSettings, ProtocolFile, merged
from grasp.errors import SettingsError
from grasp.files import check_outputs, write_whole
from grasp.text import json_text

ENDS = 5  # rows shown of either end


@command(
    "grasp explain art --target sciq --row doc-17",
    "grasp explain art --target sciq --unit sciq:152",
    "grasp explain art --target sciq --unit sciq:152 --row doc-17 --out why.html",
)
def explain(
    art: Art,
    target: OnlyTarget = None,
    row: str | None = typer.Option(None, "--row", metavar="ID", help="Row to explain, by its row_id."),
    unit: str | None = typer.Option(
        None, "--unit", metavar="ID", help="One question of the target; without --row its best and worst rows."
    ),
    out: Path | None = typer.Option(
        None, "--out", metavar="FILE", help="Write it there: .html, or the words' table as .parquet or .csv."
    ),
    json_file: JsonFile = None,
    match: Kernel = None,
    protocol: ProtocolFile = None,
    assignments: OwnSettings = [],
) -> None:
    """Why does a row count for a target? Shows what each of its words adds.

    With --unit the answer's words as well, and which word of the row bears on which of the answer; without it the
    questions that the row helps and hurts most. The model is run again on the row and on the questions. For an image:
    the trusted images that it bears on most.
    """
    from grasp.audit.explanation import Explanation

    artifact = grasp.open(art)
    check_outputs({"--out": out, "--json": json_file}, artifact.files.reads | {"--protocol reads": protocol})
    if row is None:
        if unit is None:
            raise SettingsError("explain: got neither --row nor --unit; name a row, e.g. one that grasp score prints")
        if json_file is not None:
            raise SettingsError("--json: no meaning without --row; --out writes a table of rows")
        tell(artifact.score(target, unit=unit, top=ENDS, bottom=ENDS, match=match, protocol=protocol), out)
        return
    own = merged(None, assignments, {})
    found = artifact.explain(target, row, unit=unit, match=match, protocol=protocol, own=own)
    if json_file is not None:
        write_whole(json_file, (json_text(found.to_dict()) + "\n").encode())
    if out is not None and out.suffix == ".html":
        page = f"<!doctype html><meta charset=utf-8><title>{escape(row)}</title>{found._repr_html_()}\n"
        write_whole(out, page.encode())
    elif out is not None:
        found.write(out)
    if isinstance(found, Explanation) and in_colour() and isinstance(sys.stdout, PlainStream):
        sys.stdout.styled(found.as_text(colour=True) + "\n")
    else:
        print(found)
