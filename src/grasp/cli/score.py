"""grasp score"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from grasp.cli.app import MORE, command
from grasp.cli.console import tell
from grasp.cli.options import Art, ProtocolFile, Quiet, ResultFile, names, published_methods
from grasp.cli.progress import Watch
from grasp.errors import SettingsError
from grasp.files import check_outputs
from grasp.text import plain

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from grasp.artifact.reader import ArtifactReader
    from grasp.runs.configured import ConfiguredMethod

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
    target: str = typer.Option(..., "--target", metavar="NAME", help="Target that the rows are ranked for."),
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
        None, "--match", help="Rank by one kernel: token, input or pooled.", rich_help_panel=MORE
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
    given = {"--environment": environment, "--checkpoints": checkpoints}
    no_method = given | {"--method-settings": method_settings, "--cache": cache}
    asked = _method(method, {"--match": match, "--unit": unit}, no_method, method_settings)
    from grasp.artifact.reader import ArtifactReader
    from grasp.predict.ranking import label_columns
    from grasp.predict.ranking import score as ranked
    from grasp.predict.row_arrays import checked_targets
    from grasp.predict.slices import LabelTable

    artifact = ArtifactReader.open(art)
    read = {"is the environment": environment, "is a checkpoint": checkpoints, "--protocol reads": protocol}
    check_outputs({"--out": out}, artifact.reads | read)
    if match is not None:
        artifact.relevance_name(match)  # or it says what there is
    checked_targets(artifact, [target], "--target")
    label_columns(artifact, LabelTable(artifact.rows_path), names(labels))  # or it says what there is
    values_N = None if asked is None else _scored(artifact, asked, target, environment, checkpoints, cache, quiet)
    streamed = out if out is not None and out.suffix == ".parquet" else None
    result = ranked(
        artifact,
        target,
        protocol=protocol,
        match=match,
        unit=unit,
        top=top or (None if out is not None and not bottom else 0 if bottom else TOP),
        bottom=bottom,
        where=where,
        min_tokens=min_tokens,
        labels=names(labels),
        values_N=values_N,
        by="effect" if asked is None else asked.label,
        out=streamed,
    )
    if streamed is None:
        tell(result, out)
        return
    for line in (result.headline, *result.notes, f"{out}: {result.lines:,} rows"):
        print(plain(line))


def _method(
    name: str | None, ours: Mapping[str, Any], given: Mapping[str, Any], method_settings: Path | None
) -> "ConfiguredMethod | None":
    """The method that rows are ranked by; none: relevance.

    Raises:
        SettingsError: no such method, or one of the flags in `given` has no meaning with it.
    """
    if name is None:
        published_methods(None, None, given, "--method")
        return None
    for flag, value in ours.items():
        if value is not None:
            raise SettingsError(f"{flag}: no meaning with --method; leave one of them out")
    from grasp.runs.configured import GRASP

    if name == GRASP:
        raise SettingsError("--method: got grasp, whose relevance ranks without it; leave --method out, see --match")
    (asked,) = published_methods([name], method_settings, {}, "--method")
    for flag in ("--environment", "--checkpoints"):
        if given[flag] and flag.removeprefix("--") not in asked.method.looks_at:
            raise SettingsError(f"{flag}: no meaning with --method {name}, which looks at none; leave it out")
    return asked


def _scored(
    artifact: "ArtifactReader",
    asked: "ConfiguredMethod",
    target: str,
    environment: Path | None,
    checkpoints: list[Path],
    cache: Path | None,
    quiet: bool,
) -> "NDArray[np.float64]":
    """What the method gives every row."""
    from grasp.runs.environment import Environment
    from grasp.runs.method_scores import method_rows, method_values

    known = None if environment is None else Environment.open(environment)
    with Watch(quiet=quiet) as watch:
        rows = method_rows(artifact, asked, environment=known, checkpoints=checkpoints, cache=cache, progress=watch)
    return method_values(rows, target)
