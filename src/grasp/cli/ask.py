"""Ask what rows and slices are worth: grasp predict, score, explain, report, serve."""

import sys
from contextlib import suppress
from html import escape
from pathlib import Path

import grasp
from grasp.cli.app import command, option, rare
from grasp.cli.console import PlainStream, check_outputs, in_colour, tell
from grasp.cli.options import (
    Art,
    Cache,
    Checkpoints,
    JsonFile,
    Kernel,
    MethodSettings,
    OnlyTarget,
    OwnSettings,
    Partial,
    ProtocolFile,
    Quiet,
    ResultFile,
    RunsPath,
    TargetNames,
    distinct_names,
    merged,
    names,
)
from grasp.cli.progress import Watch
from grasp.errors import SettingsError
from grasp.files import write_whole
from grasp.report import EXPLAINED
from grasp.text import json_text, size_text

TOP = 10


@command(
    "grasp score art --target sciq --top 20",
    "grasp score art --target sciq --where \"topic = 'Games'\" --bottom 20",
    "grasp score art --target sciq --out rows.parquet",
    "grasp score art --target sciq --method bm25",
)
def score(
    art: Art,
    target: OnlyTarget = None,
    top: int | None = option(
        "--top N", f"So many of the most helpful rows. Default: {TOP}, or all with --out.", None, min=0
    ),
    bottom: int = option("--bottom N", "So many of the most harmful rows.", 0, min=0),
    where: str | None = option("--where EXPR", "Only rows for which it is true, e.g. \"topic = 'Games'\".", None),
    min_tokens: int = option("--min-tokens N", "Pass over shorter rows: their relevance is noisy.", 0, min=0),
    labels: str | None = option(
        "--labels NAMES", "Label columns to show, separated by commas. Default: the first two.", None
    ),
    out: ResultFile = None,
    protocol: ProtocolFile = None,
    unit: str | None = rare("--unit ID", "Rank for one unit of the target.", None),
    match: Kernel = None,
    method: str | None = rare("--method", "Rank by a published method; see grasp methods.", None),
    method_settings: MethodSettings = None,
    checkpoints: Checkpoints = [],
    runs: Path | None = rare("--runs DIR", "Retrained subsets, for a method that is made from them.", None),
    cache: Cache = None,
    quiet: Quiet = False,
) -> None:
    """Which rows teach a target most, and which least?

    A row's effect is its relevance as the protocol counts it: above 0 it helps more than the corpus does on average.
    """
    artifact = grasp.open(art)
    read = {"holds the runs": runs, "is a checkpoint": checkpoints, "--protocol reads": protocol}
    check_outputs({"--out": out}, artifact.files.reads | read, tables=["--out"])
    with Watch(quiet=quiet) as watch:
        result = artifact.score(
            target,
            top=TOP if top is None and out is None and not bottom else top,
            bottom=bottom,
            where=where,
            unit=unit,
            min_tokens=min_tokens,
            match=match,
            labels=names(labels),
            protocol=protocol,
            method=method,
            method_settings=method_settings,
            checkpoints=checkpoints,
            runs=runs,
            cache=cache,
            out=out,
            progress=watch,
        )
    tell(result, out, written=result.lines)


ENDS = 5  # rows shown of either end


@command(
    "grasp explain art --target sciq --row doc-17",
    "grasp explain art --target sciq --unit sciq:152",
    "grasp explain art --target sciq --unit sciq:152 --row doc-17 --out why.html",
)
def explain(
    art: Art,
    target: OnlyTarget = None,
    row: str | None = option("--row ID", "Row to explain, by its row_id.", None),
    unit: str | None = option("--unit ID", "One question of the target; without --row its best and worst rows.", None),
    out: Path | None = option("--out FILE", "Write it there: .html, or the words' table as .parquet or .csv.", None),
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
    page = row is not None and out is not None and out.suffix == ".html"
    check_outputs(
        {"--out": out, "--json": json_file},
        artifact.files.reads | {"--protocol reads": protocol},
        tables=[] if page else ["--out"],
    )
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
)
def report(
    art: Art,
    out: Path | None = option("--out FILE", "HTML file to write; it needs no network.", None),
    by: str | None = option("--by LABELS", "Labels, separated by commas. Default: those of 2 to 100 values.", None),
    target: TargetNames = None,
    runs: RunsPath = None,
    selection: Path | None = option("--selection FILE", "JSON that grasp select wrote beside its --out.", None),
    mixture: Path | None = option("--mixture FILE", "JSON that grasp mix wrote beside its --out.", None),
    suspects: Path | None = option("--detect FILE", "Parquet that grasp detect wrote with --out.", None),
    atlas: Path | None = option("--atlas DIR", "Write the rows as a map that Embedding Atlas opens.", None),
    protocol: ProtocolFile = None,
    explain: int = rare(
        "--explain N", "Best rows of each target whose words are shaded, if the model is at hand.", EXPLAINED, min=0
    ),
    partial: Partial = False,
    previous: list[str] = rare(
        "--previous ART", "Artifact of an earlier checkpoint on the same corpus, oldest first; repeatable.", []
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
        runs=runs,
        partial=partial,
        selection=selection,
        mixture=mixture,
        suspects=suspects,
        previous=previous,
        explain=explain,
    )
    print(f"{page}: {size_text(page.stat().st_size)}; open it in any browser, it needs no network")


@command(
    "grasp serve art",
    "grasp serve art --port 0 --runs runs",
    "grasp serve art --mcp",
)
def serve(
    art: Art,
    port: int = option("--port N", "Port on this machine; 0: any that is free.", 8765, min=0, max=65535),
    runs: RunsPath = None,
    model: Path | None = option("--model DIR", "Where the model is now, to explain rows. Default: where it was.", None),
    mcp: bool = option(
        "--mcp", "Answer an agent over standard input and output (Model Context Protocol) instead.", False
    ),
) -> None:
    """Ask anything: the report live in a browser, or tools of an agent.

    Nobody else can reach it: it listens on this machine alone, and it only reads the artifact.
    """
    from grasp.report.serve import serve, serve_mcp

    artifact = grasp.open(art).files
    with suppress(KeyboardInterrupt):
        if mcp:
            serve_mcp(artifact, runs=runs, model=model)
        else:
            serve(artifact, port=port, runs=runs, model=model, tell=_tell)
    print("stopped", file=sys.stderr)


def _tell(address: str) -> None:
    print(f"{address}; stop with Ctrl-C", flush=True)


@command(
    "grasp predict art --by topic --target sciq",
    "grasp predict art --drop \"topic = 'Games' AND format != 'FAQs'\"",
    "grasp predict art --weight \"topic = 'Games': 0.3\" --weight \"topic = 'Health': 2\"",
    "grasp predict art --subsets subsets.parquet --out predictions.parquet",
    "grasp predict art --by topic --runs dev",
)
def predict(
    art: Art,
    by: str | None = option("--by LABEL", "What dropping each value of a label does.", None),
    drop: str | None = option("--drop EXPR", "Drop the rows for which it is true, e.g. \"topic = 'Games'\".", None),
    keep: str | None = option("--keep EXPR", "Keep only the rows for which it is true.", None),
    weight: list[str] = option(
        "--weight EXPR:NUMBER", "Weight of the rows for which it is true, 1 for others; repeatable.", []
    ),
    subsets: Path | None = option(
        "--subsets FILE", "Many subsets at once: Parquet of row_id[, subset_id, weight].", None
    ),
    target: TargetNames = None,
    runs: RunsPath = None,
    out: ResultFile = None,
    protocol: ProtocolFile = None,
    omitted: bool = rare("--omitted", "The subsets of --subsets name the rows that are left out.", False),
    family: str | None = rare("--family", "Draw subsets: uniform:F, bernoulli:Q, mixture:L or groups:L.", None),
    count: int = rare("-B N", "Subsets drawn with --family.", 100, min=1),
    seed: int = rare("--seed N", "Seed of that draw.", 0, min=0),
    units: bool = rare("--units", "A line for every unit as well.", False),
    components: bool = rare("--components", "The level, and what each part of the prediction adds.", False),
) -> None:
    """What happens to a target if rows are dropped, kept or re-weighted?

    The change against the whole corpus, 0 = the corpus, higher is better.
    """
    from grasp.verbs.predict import parse_weights

    weights = parse_weights(weight, "--weight")
    artifact = grasp.open(art)
    read = {"--subsets reads": subsets, "--protocol reads": protocol, "holds the runs": runs}
    check_outputs({"--out": out}, artifact.files.reads | read, tables=["--out"])
    result = artifact.predict(
        drop=drop,
        keep=keep,
        weight=weights or None,
        by=by,
        subsets=subsets,
        omitted=omitted,
        family=family,
        count=count,
        seed=seed,
        target=distinct_names("--target", target),
        protocol=protocol,
        runs=runs,
        components=components,
        units=units,
        out=out,
    )
    tell(result, out, written=result.lines)
