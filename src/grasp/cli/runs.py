"""grasp runs import"""

from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

import grasp
from grasp.cli.app import app, command, option, rare
from grasp.cli.console import check_outputs, tell
from grasp.cli.options import ResultFile, names

runs = typer.Typer(cls=TyperGroup, no_args_is_help=True, rich_markup_mode=None)
app.add_typer(runs, name="runs", help="Use the training runs you already have.")


@runs.callback()
def root() -> None:
    """Use the training runs you already have."""


@command(
    "grasp runs import mixtures.csv metrics.csv --label source --out runs",
    "grasp runs import runs.csv --label source --weights 'train_*' --metrics 'eval/*' --out runs",
    "grasp runs import mixtures.csv harness/ --label source --out runs",
    "grasp predict art --by source --runs runs",
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
    out: Path = option("--out DIR", "Directory of the runs, for --runs."),
    label: str | None = option(
        "--label LABEL", "Column of the corpus whose values the weights are of, e.g. source.", None
    ),
    times: bool = option("--times", "Weights say how often each value is seen; default: shares.", False),
    columns: list[str] = option("--weights PATTERN", "Columns that are weights, e.g. 'train_*'; repeatable.", []),
    metrics: list[str] = option("--metrics PATTERN", "Columns that are results, e.g. 'eval/*'; repeatable.", []),
    higher: list[str] = rare("--higher PATTERN", "Results of which more is better.", []),
    lower: list[str] = rare("--lower PATTERN", "Results of which less is better.", []),
    size: str | None = rare("--size SIZE", "Runs of this model size alone.", None),
    skip_failed: bool = rare("--skip-failed", "Leave out runs with a result that is no number.", False),
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
    print(f"{out}: {len(table):,} runs, for --runs of predict, select, mix, evaluate, calibrate and report")


RunsDirectory = Annotated[Path, typer.Argument(metavar="RUNS", help="Imported runs, see grasp runs import.")]
Metrics = Annotated[str | None, option("--metric NAMES", "Metrics, separated by commas. Default: all of them.")]


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
    check_outputs({"--out": out}, {"is read": mixtures, "holds the runs": directory}, tables=["--out"])
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
    cautious: float = option(
        "--cautious K", "Take K standard deviations off: the little known counts as worse.", 0.0, min=0
    ),
    out: ResultFile = None,
) -> None:
    """Which mixture is best? By runs alone, for the mean of the metrics.

    No value gets more, or less, than in any run.
    """
    check_outputs({"--out": out}, {"holds the runs": directory}, tables=["--out"])
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
    count: int = option("--count N", "Mixtures to propose.", 4, min=1),
    decide: str = option("--decide WHAT", "best: which mixture is; values: what each value is worth.", "best"),
    art: Path | None = option("--art ART", "Artifact of the corpus: for retrained runs, and for --subsets.", None),
    subsets: Path | None = option(
        "--subsets FILE", "The mixtures as weights of rows, for retrain --set subsets=FILE.", None
    ),
    seed: int = option("--seed N", "Seed of the mixtures that are looked at.", 0, min=0),
    out: ResultFile = None,
) -> None:
    """Which mixtures should be trained next, to decide with the fewest runs?"""
    read = {"holds the runs": directory, "is the artifact": art}
    check_outputs({"--out": out, "--subsets": subsets}, read, tables=["--out"])
    opened = None if art is None else grasp.open(art)
    result = grasp.propose_runs(
        directory, names(metric), count=count, decide=decide, seed=seed, artifact=opened, subsets=subsets
    )
    tell(result, out)
