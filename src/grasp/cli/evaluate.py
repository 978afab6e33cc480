"""grasp evaluate"""

from pathlib import Path

import typer

import grasp
from grasp.cli.app import MORE, command
from grasp.cli.options import (
    Cache,
    Checkpoints,
    JsonFile,
    MethodSettings,
    Partial,
    Quiet,
    Resamples,
    TargetNames,
    asked_names,
    names,
)
from grasp.cli.progress import Watch
from grasp.files import STREAMS, Reads, check_outputs, write_whole
from grasp.text import printable


@command(
    "grasp evaluate art --environment env --protocol protocol.yaml --csv result.csv",
    "grasp evaluate art --environment test --controls --development dev --oracle ridge",
    "grasp evaluate art --environment env --methods bm25,loss,datamodels",
    "grasp evaluate art --environment env --method-settings methods.yaml --checkpoints env/reference/seed-0",
    "grasp evaluate art --environment env --predictions theirs.parquet --predictions row_scores.npy",
)
def evaluate(
    path: Path = typer.Argument(..., metavar="ART", help="Directory or URL of the artifact."),
    environment: Path = typer.Option(
        ..., "--environment", metavar="DIR", help="Directory of retrained subsets; see grasp retrain."
    ),
    protocol: Path | None = typer.Option(
        None, "--protocol", metavar="FILE", help="Protocol file, compared beside the one that ships."
    ),
    target: TargetNames = None,
    methods: str | None = typer.Option(
        None, "--methods", metavar="NAMES", help="Published methods, separated by commas; see grasp methods."
    ),
    predictions: list[Path] = typer.Option(
        [],
        "--predictions",
        metavar="FILE",
        help="Predictions of your own: Parquet or .npy, a value a subset, or a score a row; repeatable.",
    ),
    csv_file: Path | None = typer.Option(None, "--csv", metavar="FILE", help="A line a method and target, as CSV."),
    json_file: JsonFile = None,
    partial: Partial = False,
    controls: bool = typer.Option(
        False, "--controls", help="The paper's controls and ablations as well.", rich_help_panel=MORE
    ),
    development: list[Path] = typer.Option(
        [],
        "--development",
        metavar="DIR",
        help="Environment that the controls' weights are selected on; repeatable.",
        rich_help_panel=MORE,
    ),
    family: Path | None = typer.Option(
        None, "--family", metavar="FILE", help="Protocols that the controls take parts away from.", rich_help_panel=MORE
    ),
    method_settings: MethodSettings = None,
    checkpoints: Checkpoints = [],
    cache: Cache = None,
    oracle: list[str] = typer.Option(
        [],
        "--oracle",
        metavar="NAME",
        help="ridge or lasso, fitted on the retrained subsets; :masks or :LABEL says on what.",
        rich_help_panel=MORE,
    ),
    resamples: Resamples = 1_000,
    quiet: Quiet = False,
) -> None:
    """Compare predictions with retraining, method by method.

    Rho is Spearman's, with 95 % intervals, beside the noise ceiling: what a perfect predictor would reach. Scores of
    published methods are computed once and kept; after a kill the same command goes on where it was.
    """
    art = grasp.open(path)
    read: dict[str, Reads] = {
        "is the environment": environment,
        "is a checkpoint": checkpoints,
        "--development reads": development,
        "--predictions reads": predictions,
        "--protocol reads": protocol,
        "--family reads": family,
        "--method-settings reads": method_settings,
    }
    check_outputs({"--json": json_file, "--csv": csv_file}, art.files.reads | read, streamed=("--json", "--csv"))
    with Watch(quiet=quiet) as watch:
        result = grasp.evaluate(
            art,
            environment,
            protocol=protocol,
            target=names(target),
            methods=asked_names("--methods", methods),
            method_settings=method_settings,
            controls=controls,
            development=development,
            family=family,
            predictions=predictions,
            oracles=oracle,
            checkpoints=checkpoints,
            cache=cache,
            partial=partial,
            resamples=resamples,
            progress=watch,
        )
    if not {json_file, csv_file} & {*STREAMS}:
        print(result)
    for file, text in ((json_file, result.to_json), (csv_file, result.to_csv)):
        if file in STREAMS:
            print(printable(text()), end="")
        elif file is not None:
            write_whole(file, text().encode())
