"""grasp runs import"""

from pathlib import Path

import typer
from typer.core import TyperGroup

from grasp.cli.app import MORE, Command, app
from grasp.files import check_outputs

# \b keeps the lines of the epilog as they are.
EXAMPLES = """\b
Examples:
  grasp runs import mixtures.csv metrics.csv --label source --out runs
  grasp runs import runs.csv --label source --weights 'train_*' --metrics 'eval/*' --out runs
  grasp runs import mixtures.csv harness/ --label source --out runs
  grasp predict art --by source --environment runs
"""

runs = typer.Typer(cls=TyperGroup, no_args_is_help=True, rich_markup_mode=None)
app.add_typer(runs, name="runs", help="Use the training runs you already have.")


@runs.callback()
def root() -> None:
    """Use the training runs you already have."""


@runs.command("import", cls=Command, epilog=EXAMPLES)
def import_runs(
    trained: Path = typer.Argument(
        ..., metavar="FILE", help="What each run was trained on: a line a run, a column a value of a label."
    ),
    results: Path | None = typer.Argument(
        None, metavar="[RESULTS]", help="What came out: CSV, Parquet, or a directory of lm-evaluation-harness."
    ),
    out: Path = typer.Option(..., "--out", metavar="DIR", help="Directory of the runs, for --environment."),
    label: str | None = typer.Option(
        None, "--label", metavar="LABEL", help="Column of the corpus whose values the weights are of, e.g. source."
    ),
    times: bool = typer.Option(False, "--times", help="Weights say how often each value is seen; default: shares."),
    columns: list[str] = typer.Option(
        [], "--weights", metavar="PATTERN", help="Columns that are weights, e.g. 'train_*'; repeatable."
    ),
    metrics: list[str] = typer.Option(
        [], "--metrics", metavar="PATTERN", help="Columns that are results, e.g. 'eval/*'; repeatable."
    ),
    higher: list[str] = typer.Option(
        [], "--higher", metavar="PATTERN", help="Results of which more is better.", rich_help_panel=MORE
    ),
    lower: list[str] = typer.Option(
        [], "--lower", metavar="PATTERN", help="Results of which less is better.", rich_help_panel=MORE
    ),
    size: str | None = typer.Option(
        None, "--size", metavar="SIZE", help="Runs of this model size alone.", rich_help_panel=MORE
    ),
    skip_failed: bool = typer.Option(
        False, "--skip-failed", help="Leave out runs with a result that is no number.", rich_help_panel=MORE
    ),
) -> None:
    """Read runs that you have made: what each was trained on, and what came out.

    RegMix-like CSVs, one wide table, results of lm-evaluation-harness, or an export of wandb. What takes retrained runs
    takes them as well.
    """
    import grasp

    check_outputs({"--out": out}, {"is read": trained, "is read as well": results})
    table = grasp.import_runs(
        trained,
        results,
        label=label,
        weights="times" if times else "shares",
        columns=columns,
        metrics=metrics,
        higher=higher,
        lower=lower,
        size=size,
        skip_failed=skip_failed,
        out=out,
    )
    print(table)
    print(f"{out}: {len(table):,} runs, for --environment of predict, select, mix, evaluate, calibrate and report")
