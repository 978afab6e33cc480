"""The commands `grasp runs import`, `predict`, `mix` and `propose`, for training runs of other tools."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import grasp
from grasp.cli.app import command, option
from grasp.cli.console import check_outputs, print_result
from grasp.cli.options import ResultFile

# the entry point of the group `grasp.commands`
commands = typer.Typer(name="runs", cls=TyperGroup, no_args_is_help=True, rich_markup_mode=None)


@commands.callback()
def root() -> None:
    """Use the training runs you already have."""


@command(
    "grasp runs import mixtures.csv metrics.csv --label source --out runs",
    "grasp runs import runs.csv --label source --weights 'train_*' --metrics 'eval/*' --out runs",
    "grasp runs import mixtures.csv harness/ --label source --out runs",
    "grasp predict art --by source --runs runs",
    name="import",
    group=commands,
    verb="grasp.mixing.import_runs",
    more="measure higher lower size skip_failed",
)
def import_runs(
    trained: Path = typer.Argument(
        ..., metavar="FILE", help="Mixture of each run: one row per run, one column per label value."
    ),
    results: Path | None = typer.Argument(
        None, metavar="RESULTS", help="Results: CSV, Parquet, or a directory of an evaluation harness."
    ),
    weights: bool = option("--times", "Weights are numbers of epochs per label value. Default: shares.", False),
    out: Path = option("--out DIR", "Directory of the runs, for --runs."),
    **params: Any,
) -> None:
    table = grasp.import_runs(trained, results, weights="times" if weights else "shares", out=out, **params)
    print(table)
    print(f"{out}: {len(table):,} runs, for --runs of predict, select, mix, evaluate, calibrate and report")


RunsDirectory = Annotated[Path, typer.Argument(metavar="RUNS", help="Directory written by grasp runs import.")]


@command(
    "grasp runs predict runs mixtures.csv --metric sciq/loss",
    name="predict",
    group=commands,
    verb="grasp.mixing.mixture_model",
)
def predict_runs(
    runs: RunsDirectory,
    mixtures: Path = typer.Argument(
        ..., metavar="MIXTURES", help="Mixtures: one row per mixture, one column per label value."
    ),
    out: ResultFile = None,
    **params: Any,
) -> None:
    check_outputs({"--out": out}, {"is read": mixtures, "holds the runs": runs}, tables=["--out"])
    print_result(grasp.predict_runs(runs, mixtures, **params), out)


@command("grasp runs metrics runs", name="metrics", group=commands, verb="grasp.mixing.metric_quality")
def assess_metrics(runs: RunsDirectory, out: ResultFile = None) -> None:
    check_outputs({"--out": out}, {"holds the runs": runs}, tables=["--out"])
    print_result(grasp.assess_metrics(runs), out)


@command(
    "grasp runs mix runs --metric sciq/loss",
    "grasp runs mix runs --cautious 1 --out best.csv",
    name="mix",
    group=commands,
    verb="grasp.mixing.mixture_model",
)
def mix_runs(runs: RunsDirectory, out: ResultFile = None, **params: Any) -> None:
    check_outputs({"--out": out}, {"holds the runs": runs}, tables=["--out"])
    print_result(grasp.mix_runs(runs, **params), out)


@command(
    "grasp runs propose runs --count 4 --out next.csv",
    "grasp runs propose runs --art art --subsets next.parquet",
    name="propose",
    group=commands,
    verb="grasp.mixing.proposals",
)
def propose_runs(
    runs: RunsDirectory,
    count: int = option("--count N", "Mixtures to propose.", 4, min=1),
    art: Path | None = option("--art ART", "Artifact of the corpus; required for --subsets.", None),
    out: ResultFile = None,
    **params: Any,
) -> None:
    inputs = {"holds the runs": runs, "is the artifact": art}
    check_outputs({"--out": out, "--subsets": params["subsets"]}, inputs, tables=["--out"])
    opened = None if art is None else grasp.open(art)
    print_result(grasp.propose_runs(runs, count=count, artifact=opened, **params), out)
