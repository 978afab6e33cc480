"""grasp score"""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from grasp.cli.app import app
from grasp.cli.options import names, output_file
from grasp.cli.tables import show
from grasp.errors import SettingsError

if TYPE_CHECKING:
    from grasp.artifact.reader import Artifact


@app.command(epilog="Example: grasp score art --target sciq --top 20")
def score(
    path: Path = typer.Argument(..., metavar="ART", help="Directory of the artifact."),
    target: str = typer.Option(..., "--target", help="Target whose units the rows are scored for."),
    top: int = typer.Option(0, "--top", min=0, help="Show so many of the most helpful rows; 10 if nothing is asked."),
    bottom: int = typer.Option(0, "--bottom", min=0, help="Show so many of the most harmful rows."),
    match: str | None = typer.Option(None, "--match", help="token or pooled; token where the artifact has it."),
    min_tokens: int = typer.Option(0, "--min-tokens", min=0, help="Pass over shorter rows: their relevance is noisy."),
    labels: str | None = typer.Option(None, "--labels", help="Label columns to show, separated by commas."),
    out: Path | None = typer.Option(None, "--out", help="Parquet of the rows shown; of all rows if none are asked."),
) -> None:
    """Show rows by relevance to a target.

    Positive means that training on the row should lower the loss of the target's units.
    """
    from grasp.artifact.reader import Artifact
    from grasp.protocol.tables import ranked_rows, write_ranking

    output_file("--out", out)
    artifact = Artifact.open(path)
    if not top and not bottom and out is None:
        top = 10
    shown = _columns(artifact, names(labels))
    if match is not None:
        artifact.relevance_name(match)  # or it says what there is
    for title, k, worst in (("most helpful", top, False), ("most harmful", bottom, True)):
        if k:
            table = ranked_rows(artifact, target, k, bottom=worst, kernel=match, min_tokens=min_tokens)
            if not table.num_rows:
                raise SettingsError(f"--min-tokens: got {min_tokens}, no row of {path} is as long")
            show(
                f"{title} rows for {target}, by relevance",
                ("rank", "relevance", "row_id", *shown, "text"),
                [
                    (
                        i,
                        f"{row['relevance']:+.4g}",
                        row["row_id"],
                        *(row.get(name) for name in shown),
                        row["snippet"],
                    )
                    for i, row in enumerate(table.to_pylist(), 1)
                ],
                left=0,
            )
    if out is not None:
        parts = [(k, worst) for k, worst in ((top, False), (bottom, True)) if k] or [(artifact.n_rows, False)]
        lines = write_ranking(artifact, target, out, parts, kernel=match, min_tokens=min_tokens)
        print(f"{out}: {lines:,} rows")


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
