"""grasp runs import"""

from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

import grasp
from grasp.cli.app import MORE, app, command
from grasp.cli.console import tell
from grasp.cli.options import ResultFile, names
from grasp.files import check_outputs

runs = typer.Typer(cls=TyperGroup, no_args_is_help=True, rich_markup_mode=None)
app.add_typer(runs, name="runs", help="Use the training runs you already have.")


@runs.callback()
def root() -> None:
    """Use the training runs you already have."""


@command(
    "grasp runs import mixtures.csv metrics.csv --label source --out runs",
    "grasp runs import runs.csv --label source --weights 'train_*' --metrics 'eval/*' --out runs",
    "grasp runs import mixtures.csv harness/ --label source --out runs",
    "grasp predict art --by source --environment runs",
    name="import",
    group=runs,
)
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


RunsDirectory = Annotated[Path, typer.Argument(metavar="RUNS", help="Imported runs, see grasp runs import.")]
Metrics = Annotated[
    str | None, typer.Option("--metric", metavar="NAMES", help="Metrics, separated by commas. Default: all of them.")
]


@command(
    "grasp runs predict runs mixtures.csv --metric sciq/loss",
    name="predict",
    group=runs,
)
def predict_runs(
    directory: RunsDirectory,
    mixtures: Path = typer.Argument(..., metavar="MIXTURES", help="A line a mixture, a column a value of the label."),
    metric: Metrics = None,
    out: ResultFile = None,
) -> None:
    """What would these mixtures give? By runs alone, without an artifact."""
    check_outputs({"--out": out}, {"is read": mixtures, "holds the runs": directory})
    result = grasp.predict_runs(directory, mixtures, names(metric))
    tell(result, out)


@command(
    "grasp runs mix runs --metric sciq/loss",
    "grasp runs mix runs --cautious 1 --out best.csv",
    name="mix",
    group=runs,
)
def mix_runs(
    directory: RunsDirectory,
    metric: Metrics = None,
    cautious: float = typer.Option(
        0.0, "--cautious", min=0, metavar="K", help="Take K standard deviations off: the little known counts as worse."
    ),
    out: ResultFile = None,
) -> None:
    """Which mixture is best? By runs alone, for the mean of the metrics.

    No value gets more, or less, than in any run.
    """
    check_outputs({"--out": out}, {"holds the runs": directory})
    result = grasp.mix_runs(directory, names(metric), cautious=cautious)
    tell(result, out)


@command(
    "grasp runs propose runs --count 4 --out next.csv",
    "grasp runs propose runs --art art --subsets next.parquet",
    name="propose",
    group=runs,
)
def propose_runs(
    directory: RunsDirectory,
    metric: Metrics = None,
    count: int = typer.Option(4, "--count", min=1, metavar="N", help="Mixtures to propose."),
    decide: str = typer.Option(
        "best", "--decide", metavar="WHAT", help="best: which mixture is; values: what each value is worth."
    ),
    art: Path | None = typer.Option(
        None, "--art", metavar="ART", help="Artifact of the corpus: for retrained runs, and for --subsets."
    ),
    subsets: Path | None = typer.Option(
        None, "--subsets", metavar="FILE", help="The mixtures as weights of rows, for retrain --set subsets=FILE."
    ),
    seed: int = typer.Option(0, "--seed", min=0, metavar="N", help="Seed of the mixtures that are looked at."),
    out: ResultFile = None,
) -> None:
    """Which mixtures should be trained next, so that a decision becomes surest for the fewest runs?"""
    check_outputs({"--out": out, "--subsets": subsets}, {"holds the runs": directory, "is the artifact": art})
    opened = None if art is None else grasp.open(art)
    result = grasp.propose_runs(
        directory, names(metric), count=count, decide=decide, seed=seed, artifact=opened, subsets=subsets
    )
    tell(result, out)
