"""grasp score"""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from grasp.cli.app import app
from grasp.cli.options import names, output_file, published_methods
from grasp.cli.progress import Watch
from grasp.cli.tables import show
from grasp.errors import SettingsError

if TYPE_CHECKING:
    from grasp.artifact.reader import Artifact
    from grasp.protocol.ranking import MethodRows

# \b keeps the lines of the epilog as they are.
EXAMPLES = """\b
Examples:
  grasp score art --target sciq --top 20
  grasp score art --target sciq --method bm25
"""


@app.command(epilog=EXAMPLES)
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
    output_file("--out", out)
    source, kernel = _source(path, match, method, method_settings, environment, checkpoints, cache, quiet)
    if not top and not bottom and out is None:
        top = 10
    parts = [(k, worst) for k, worst in ((top, False), (bottom, True)) if k]
    for k, worst in parts:
        _show(source, target, k, worst, kernel, min_tokens, names(labels))
    if out is not None:
        from grasp.protocol.tables import write_ranking

        lines = write_ranking(
            source, target, out, parts or [(source.n_rows, False)], kernel=kernel, min_tokens=min_tokens
        )
        print(f"{out}: {lines:,} rows")


def _source(
    path: Path,
    match: str | None,
    method: str | None,
    method_settings: Path | None,
    environment: Path | None,
    checkpoints: list[Path],
    cache: Path | None,
    quiet: bool,
) -> "tuple[Artifact | MethodRows, str | None]":
    """The artifact, or its rows under a method's scores; and which scores are ranked by."""
    from grasp.artifact.reader import Artifact

    if method is None:
        idle = {"--method-settings": method_settings, "--environment": environment}
        published_methods(None, None, idle | {"--checkpoints": checkpoints, "--cache": cache}, "--method")
        artifact = Artifact.open(path)
        if match is not None:
            artifact.relevance_name(match)  # or it says what there is
        return artifact, match
    if match is not None:
        raise SettingsError("--match: no meaning with --method; leave one of them out")
    (asked,) = published_methods([method], method_settings, {}, "--method")
    from grasp.fidelity.environment import Environment
    from grasp.protocol.ranking import rows_by_method

    known = None if environment is None else Environment.open(environment)
    with Watch(quiet=quiet) as watch:
        source = rows_by_method(
            Artifact.open(path), asked, environment=known, checkpoints=checkpoints, cache=cache, progress=watch
        )
    return source, asked.label


def _show(
    source: "Artifact | MethodRows",
    target: str,
    k: int,
    worst: bool,
    kernel: str | None,
    min_tokens: int,
    labels: list[str] | None,
) -> None:
    """Print the best, or worst, rows with their text."""
    from grasp.protocol.ranking import MethodRows
    from grasp.protocol.tables import ranked_rows

    artifact, by = (source.artifact, source.label) if isinstance(source, MethodRows) else (source, "relevance")
    table = ranked_rows(source, target, k, bottom=worst, kernel=kernel, min_tokens=min_tokens)
    if not table.num_rows:
        raise SettingsError(f"--min-tokens: got {min_tokens}, no row of {artifact.where} is as long")
    shown = _columns(artifact, labels)
    show(
        f"most {'harmful' if worst else 'helpful'} rows for {target}, by {by}",
        ("rank", by, "row_id", *shown, "text"),
        [
            (i, f"{row['relevance']:+.4g}", row["row_id"], *(row.get(name) for name in shown), row["snippet"])
            for i, row in enumerate(table.to_pylist(), 1)
        ],
        left=0,
    )


def _columns(artifact: "Artifact", asked: list[str] | None) -> list[str]:
    """Columns of the row table to show: those asked for, else the first two labels."""
    from grasp.subsets import LabelTable

    if asked is None:
        return list(artifact.manifest.details.get("labels", []))[:2]
    known = LabelTable(artifact.rows_path).columns
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise SettingsError(f"--labels: got {', '.join(unknown)}; the artifact has {', '.join(known)}")
    return asked
