"""Ask what rows and slices are worth: grasp predict, score, explain, report, serve."""

import sys
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

import grasp
from grasp.cli.app import command, option
from grasp.cli.console import PlainStream, check_outputs, in_colour, tell
from grasp.cli.options import Art, JsonFile, OwnSettings, Quiet, ResultFile, merged, names
from grasp.cli.progress_display import Watch
from grasp.errors import SettingsError
from grasp.files import write_whole
from grasp.text import json_text, size_text

TOP = 10


@command(
    "grasp score art --target sciq --top 20",
    "grasp score art --target sciq --where \"topic = 'Games'\" --bottom 20",
    "grasp score art --target sciq --out rows.parquet",
    "grasp score art --target sciq --method bm25",
    verb="grasp.api.score",
    more="protocol unit match method method_settings checkpoints runs cache",
)
def score(
    art: Art,
    top: int | None = option(
        "--top N", f"So many of the most helpful rows. Default: {TOP}, or all with --out.", None, min=0
    ),
    out: ResultFile = None,
    quiet: Quiet = False,
    **asked: Any,
) -> None:
    artifact = grasp.open(art)
    check_outputs({"--out": out}, artifact=artifact.files, asked=asked, tables=["--out"])
    if top is None and out is None and not asked["bottom"]:
        top = TOP
    with Watch(quiet=quiet) as watch:
        result = artifact.score(**asked, top=top, out=out, progress=watch)
    tell(result, out, written=result.lines)


ENDS = 5  # rows shown of either end


@command(
    "grasp explain art --target sciq --row doc-17",
    "grasp explain art --target sciq --unit sciq:152",
    "grasp explain art --target sciq --unit sciq:152 --row doc-17 --out why.html",
    verb="grasp.inspect.explain",
    more="match protocol",
)
def explain(
    art: Art,
    row: str | None = option("--row ID", "Row to explain, by its row_id.", None),
    unit: str | None = option("--unit ID", "One question of the target; without --row its best and worst rows.", None),
    out: Path | None = option("--out FILE", "Write it there: .html, or the words' table as .parquet or .csv.", None),
    json_file: JsonFile = None,
    assignments: OwnSettings = [],
    **asked: Any,
) -> None:
    from grasp.inspect.explanation import Explanation

    artifact = grasp.open(art)
    page = row is not None and out is not None and out.suffix == ".html"
    check_outputs(
        {"--out": out, "--json": json_file},
        artifact=artifact.files,
        asked=asked,
        tables=[] if page else ["--out"],
    )
    if row is None:
        if unit is None:
            raise SettingsError("explain: got neither --row nor --unit; name a row, e.g. one that grasp score prints")
        if json_file is not None:
            raise SettingsError("--json: no meaning without --row; --out writes a table of rows")
        tell(artifact.score(unit=unit, top=ENDS, bottom=ENDS, **asked), out)
        return
    found = artifact.explain(row=row, unit=unit, own=merged(None, assignments, {}), **asked)
    if json_file is not None:
        write_whole(json_file, (json_text(found.to_dict()) + "\n").encode())
    if out is not None and page:
        html = f"<!doctype html><meta charset=utf-8><title>{escape(row)}</title>{found._repr_html_()}\n"
        write_whole(out, html.encode())
    elif out is not None:
        found.write(out)
    if isinstance(found, Explanation) and in_colour() and isinstance(sys.stdout, PlainStream):
        sys.stdout.styled(found.as_text(colour=True) + "\n")
    else:
        print(found)


@command(
    "grasp report art --out report.html",
    "grasp report art --runs dev --selection kept.json --mixture mixture.json --out report.html",
    "grasp report art --detect suspects.parquet --out report.html",
    "grasp report art --atlas map",
    "grasp report step-3000 --previous step-1000 --previous step-2000 --by topic --out report.html",
    verb="grasp.report.build_report",
    more="protocol explain partial previous",
)
def report(
    art: Art,
    out: Path | None = option("--out FILE", "HTML file to write; it needs no network.", None),
    atlas: Path | None = option("--atlas DIR", "Write the rows as a map that Embedding Atlas opens.", None),
    **asked: Any,
) -> None:
    artifact = grasp.open(art)
    if out is None and atlas is None:
        raise SettingsError("report: got neither --out nor --atlas; name the file of the page, or a directory, or both")
    check_outputs({"--out": out}, artifact=artifact.files, asked=asked)
    if atlas is not None:
        from grasp.predict.scoring_rule import as_protocol
        from grasp.report.atlas import write_atlas

        opens = write_atlas(
            artifact.files,
            atlas,
            protocol=as_protocol(asked["protocol"], artifact.files),
            targets=names(asked["target"]),
        )
        print(f"{atlas}: the rows as a map; pip install embedding-atlas, then\n  {opens}")
    if out is None:
        return
    page = artifact.report(out, **asked)
    print(f"{page}: {size_text(page.stat().st_size)}; open it in any browser, it needs no network")


@command(
    "grasp serve art",
    "grasp serve art --port 0 --runs runs",
    "grasp serve art --mcp",
    verb="grasp.report.serve",
)
def serve(
    art: Art,
    port: int = option("--port N", "Port on this machine; 0: any that is free.", 8765, min=0, max=65535),
    mcp: bool = option(
        "--mcp", "Answer an agent over standard input and output (Model Context Protocol) instead.", False
    ),
    **asked: Any,
) -> None:
    """Ask anything: the report live in a browser, or tools of an agent.

    Nobody else can reach it: it listens on this machine alone, and it only reads the artifact.
    """
    from grasp.report.serve import serve, serve_mcp

    artifact = grasp.open(art).files
    with suppress(KeyboardInterrupt):
        if mcp:
            serve_mcp(artifact, **asked)
        else:
            serve(artifact, port=port, tell=_tell, **asked)
    print("stopped", file=sys.stderr)


def _tell(address: str) -> None:
    print(f"{address}; stop with Ctrl-C", flush=True)


@command(
    "grasp predict art --by topic --target sciq",
    "grasp predict art --drop \"topic = 'Games' AND format != 'FAQs'\"",
    "grasp predict art --weight \"topic = 'Games': 0.3\" --weight \"topic = 'Health': 2\"",
    "grasp predict art --subsets subsets.parquet --out predictions.parquet",
    "grasp predict art --by topic --runs dev",
    verb="grasp.api.predict",
    more="protocol omitted family count seed units components",
)
def predict(art: Art, out: ResultFile = None, **asked: Any) -> None:
    if asked["weight"]:
        from grasp.api.predict import parse_weights

        asked["weight"] = parse_weights(asked["weight"], "--weight")
    artifact = grasp.open(art)
    check_outputs({"--out": out}, artifact=artifact.files, asked=asked, tables=["--out"])
    result = artifact.predict(**asked, out=out)
    tell(result, out, written=result.lines)
