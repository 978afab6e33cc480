"""grasp runs import"""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import grasp
from grasp.cli.app import app, command, option
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
    verb="grasp.runs.readers",
    more="higher lower size skip_failed",
)
def import_runs(
    trained: Path = typer.Argument(
        ..., metavar="FILE", help="What each run was trained on: a line a run, a column a value of a label."
    ),
    results: Path | None = typer.Argument(
        None, metavar="[RESULTS]", help="What came out: CSV, Parquet, or a directory of lm-evaluation-harness."
    ),
    weights: bool = option("--times", "Weights say how often each value is seen; default: shares.", False),
    out: Path = option("--out DIR", "Directory of the runs, for --runs."),
    **asked: Any,
) -> None:
    table = grasp.import_runs(trained, results, weights="times" if weights else "shares", out=out, **asked)
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
