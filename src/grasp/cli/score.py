"""grasp score"""

from pathlib import Path

import typer

import grasp
from grasp.cli.app import MORE, command
from grasp.cli.console import tell
from grasp.cli.options import (
    Art,
    Cache,
    Checkpoints,
    Kernel,
    MethodSettings,
    OnlyTarget,
    ProtocolFile,
    Quiet,
    ResultFile,
    names,
)
from grasp.cli.progress import Watch
from grasp.files import check_outputs

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
    top: int = typer.Option(
        0, "--top", min=0, metavar="N", help=f"So many of the most helpful rows. Default: {TOP}, or all with --out."
    ),
    bottom: int = typer.Option(0, "--bottom", min=0, metavar="N", help="So many of the most harmful rows."),
    where: str | None = typer.Option(
        None, "--where", metavar="EXPR", help="Only rows for which it is true, e.g. \"topic = 'Games'\"."
    ),
    min_tokens: int = typer.Option(
        0, "--min-tokens", min=0, metavar="N", help="Pass over shorter rows: their relevance is noisy."
    ),
    labels: str | None = typer.Option(
        None, "--labels", metavar="NAMES", help="Label columns to show, separated by commas. Default: the first two."
    ),
    out: ResultFile = None,
    protocol: ProtocolFile = None,
    unit: str | None = typer.Option(
        None, "--unit", metavar="ID", help="Rank for one unit of the target.", rich_help_panel=MORE
    ),
    match: Kernel = None,
    method: str | None = typer.Option(
        None, "--method", help="Rank by a published method; see grasp methods.", rich_help_panel=MORE
    ),
    method_settings: MethodSettings = None,
    checkpoints: Checkpoints = [],
    environment: Path | None = typer.Option(
        None,
        "--environment",
        metavar="DIR",
        help="Retrained subsets, for a method that is made from them.",
        rich_help_panel=MORE,
    ),
    cache: Cache = None,
    quiet: Quiet = False,
) -> None:
    """Which rows teach a target most, and which least?

    A row's effect is its relevance as the protocol counts it: above 0 it helps more than the corpus does on average.
    """
    artifact = grasp.open(art)
    read = {"is the environment": environment, "is a checkpoint": checkpoints, "--protocol reads": protocol}
    check_outputs({"--out": out}, artifact.files.reads | read)
    with Watch(quiet=quiet) as watch:
        result = artifact.score(
            target,
            top=top or (None if out is not None and not bottom else 0 if bottom else TOP),
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
            runs=environment,
            cache=cache,
            out=out,
            progress=watch,
        )
    tell(result, out, written=result.lines)
