"""grasp score"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from grasp.cli.app import command
from grasp.cli.console import show
from grasp.cli.options import names, published_methods
from grasp.cli.progress import Watch
from grasp.errors import SettingsError
from grasp.files import check_outputs

if TYPE_CHECKING:
    from grasp.artifact.reader import Artifact
    from grasp.runs.configured import ConfiguredMethod
    from grasp.runs.method_rows import MethodRows

# \b keeps the lines of the epilog as they are.
EXAMPLES = """\b
Examples:
  grasp score art --target sciq --top 20
  grasp score art --target sciq --method bm25
"""


@command(EXAMPLES)
def score(
    path: Path = typer.Argument(..., metavar="ART", help="Directory or URL of the artifact."),
    target: str = typer.Option(..., "--target", help="Target whose units the rows are scored for."),
    top: int = typer.Option(0, "--top", min=0, help="Show so many of the most helpful rows; 10 if nothing is asked."),
    bottom: int = typer.Option(0, "--bottom", min=0, help="Show so many of the most harmful rows."),
    match: str | None = typer.Option(None, "--match", help="token, input or pooled; token where the artifact has it."),
    method: str | None = typer.Option(
        None, "--method", help="Rank by a published method instead of relevance; see grasp methods."
    ),
    method_settings: Path | None = typer.Option(
        None, "--method-settings", help="YAML of settings by method, or by a label of your own; see grasp methods."
    ),
    checkpoints: list[Path] = typer.Option(
        [], "--checkpoints", help="Checkpoint, or directory of a training run; none: beside the model. Repeatable."
    ),
    environment: Path | None = typer.Option(
        None, "--environment", help="Retrained subsets, for a method that is made from them."
    ),
    cache: Path | None = typer.Option(None, "--cache", help="Where a method's scores are kept; none: in the artifact."),
    min_tokens: int = typer.Option(0, "--min-tokens", min=0, help="Pass over shorter rows: their relevance is noisy."),
    labels: str | None = typer.Option(None, "--labels", help="Label columns to show, separated by commas."),
    out: Path | None = typer.Option(None, "--out", help="Parquet of the rows shown; of all rows if none are asked."),
    quiet: bool = typer.Option(False, "--quiet", help="Plain lines instead of a progress bar."),
) -> None:
    """Show rows by relevance, or by a method's score.

    Positive means that training on the row should lower the loss of the target's units.
    """
    given = {"--environment": environment, "--checkpoints": checkpoints}
    asked = _method(method, match, given | {"--method-settings": method_settings, "--cache": cache}, method_settings)
    from grasp.artifact.reader import Artifact
    from grasp.predict.source import checked_targets

    artifact = Artifact.open(path)
    check_outputs({"--out": out}, artifact.reads | {"is the environment": environment, "is a checkpoint": checkpoints})
    if match is not None:
        artifact.relevance_name(match)  # or it says what there is
    checked_targets(artifact, [target], "--target")
    columns = _columns(artifact, names(labels))
    source = artifact if asked is None else _scored(artifact, asked, environment, checkpoints, cache, quiet)
    kernel = match if asked is None else asked.label
    if not top and not bottom and out is None:
        top = 10
    parts = [(k, worst) for k, worst in ((top, False), (bottom, True)) if k]
    for k, worst in parts:
        _show(source, target, k, worst, kernel, min_tokens, columns)
    if out is not None:
        from grasp.predict.row_tables import write_ranking

        lines = write_ranking(
            source, target, out, parts or [(source.n_rows, False)], kernel=kernel, min_tokens=min_tokens
        )
        print(f"{out}: {lines:,} rows")


def _method(
    name: str | None, match: str | None, given: Mapping[str, Any], method_settings: Path | None
) -> "ConfiguredMethod | None":
    """The method that rows are ranked by; none: relevance.

    Raises:
        SettingsError: no such method, or one of the flags in `given` has no meaning with it.
    """
    if name is None:
        published_methods(None, None, given, "--method")
        return None
    if match is not None:
        raise SettingsError("--match: no meaning with --method; leave one of them out")
    from grasp.runs.configured import GRASP

    if name == GRASP:
        raise SettingsError("--method: got grasp, whose relevance ranks without it; leave --method out, see --match")
    (asked,) = published_methods([name], method_settings, {}, "--method")
    for flag in ("--environment", "--checkpoints"):
        if given[flag] and flag.removeprefix("--") not in asked.method.looks_at:
            raise SettingsError(f"{flag}: no meaning with --method {name}, which looks at none; leave it out")
    return asked


def _scored(
    artifact: "Artifact",
    asked: "ConfiguredMethod",
    environment: Path | None,
    checkpoints: list[Path],
    cache: Path | None,
    quiet: bool,
) -> "MethodRows":
    """The rows under a method's scores."""
    from grasp.runs.environment import Environment
    from grasp.runs.method_rows import method_rows

    known = None if environment is None else Environment.open(environment)
    with Watch(quiet=quiet) as watch:
        return method_rows(artifact, asked, environment=known, checkpoints=checkpoints, cache=cache, progress=watch)


def _show(
    source: "Artifact | MethodRows",
    target: str,
    k: int,
    worst: bool,
    kernel: str | None,
    min_tokens: int,
    columns: list[str],
) -> None:
    """Print the best, or worst, rows with some columns of the row table and their text."""
    from grasp.predict.row_tables import ranked_rows
    from grasp.runs.method_rows import MethodRows

    artifact, by = (source.artifact, source.label) if isinstance(source, MethodRows) else (source, "relevance")
    table = ranked_rows(source, target, k, bottom=worst, kernel=kernel, min_tokens=min_tokens)
    if not table.num_rows:
        raise SettingsError(f"--min-tokens: got {min_tokens}, no row of {artifact.where} is as long")
    show(
        f"most {'harmful' if worst else 'helpful'} rows for {target}, by {by}",
        ("rank", by, "row_id", *columns, "text"),
        [
            (i, f"{row['relevance']:+.4g}", row["row_id"], *(row.get(name) for name in columns), row["snippet"])
            for i, row in enumerate(table.to_pylist(), 1)
        ],
        left=0,
    )


def _columns(artifact: "Artifact", asked: list[str] | None) -> list[str]:
    """Columns of the row table to show: those asked for, else the first two labels."""
    from grasp.predict.slices import LabelTable

    if asked is None:
        return list(artifact.manifest.details.get("labels", []))[:2]
    known = LabelTable(artifact.rows_path).columns
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise SettingsError(f"--labels: got {', '.join(unknown)}; the artifact has {', '.join(known)}")
    return asked
