"""grasp score"""

from pathlib import Path

import typer

import grasp
from grasp.cli.app import MORE, command
from grasp.cli.console import tell
from grasp.cli.options import Art, ProtocolFile, Quiet, ResultFile, names
from grasp.cli.progress import Watch
from grasp.files import check_outputs

TOP = 10
# \b keeps the lines of the epilog as they are.
EXAMPLES = """\b
Examples:
  grasp score art --target sciq --top 20
  grasp score art --target sciq --where "topic = 'Games'" --bottom 20
  grasp score art --target sciq --out rows.parquet
  grasp score art --target sciq --method bm25
"""


@command(EXAMPLES)
def score(
    art: Art,
    target: str | None = typer.Option(
        None, "--target", metavar="NAME", help="Target that the rows are ranked for. Default: the only one."
    ),
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
    match: str | None = typer.Option(
        None, "--match", help="Rank by one kernel: token, input, neighbour, shift or pooled.", rich_help_panel=MORE
    ),
    method: str | None = typer.Option(
        None, "--method", help="Rank by a published method; see grasp methods.", rich_help_panel=MORE
    ),
    method_settings: Path | None = typer.Option(
        None, "--method-settings", metavar="FILE", help="YAML of settings of the method.", rich_help_panel=MORE
    ),
    checkpoints: list[Path] = typer.Option(
        [],
        "--checkpoints",
        metavar="DIR",
        help="Checkpoint, or training run, for a method that looks at several. Default: beside the model. Repeatable.",
        rich_help_panel=MORE,
    ),
    environment: Path | None = typer.Option(
        None,
        "--environment",
        metavar="DIR",
        help="Retrained subsets, for a method that is made from them.",
        rich_help_panel=MORE,
    ),
    cache: Path | None = typer.Option(
        None,
        "--cache",
        metavar="DIR",
        help="Where a method's scores are kept. Default: in the artifact.",
        rich_help_panel=MORE,
    ),
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
