"""grasp mix"""

from pathlib import Path

import typer

import grasp
from grasp.cli.app import MORE, command
from grasp.cli.options import (
    Art,
    Cautious,
    Diversity,
    EnvironmentPath,
    ProtocolFile,
    RepeatWorth,
    TargetWeights,
    TrainTokens,
    beside,
)
from grasp.files import check_outputs


@command(
    "grasp mix art --by topic --target sciq",
    "grasp mix art --by topic --target sciq=2,openbookqa=1 --distance 30% --cap Games:5% --out mixture.parquet",
    "grasp mix art --by source --train-tokens 100B --environment dev --weights weights.parquet",
)
def mix(
    art: Art,
    by: str = typer.Option(..., "--by", metavar="LABEL", help="Label whose values are mixed."),
    target: TargetWeights = None,
    floor: list[str] = typer.Option(
        [],
        "--floor",
        metavar="[VALUE:]SHARE",
        help="At least so much of the mixture, e.g. Games:5%; 0% lets a value go; repeatable.",
    ),
    cap: list[str] = typer.Option(
        [], "--cap", metavar="[VALUE:]SHARE", help="At most so much of the mixture, e.g. 20% of each; repeatable."
    ),
    max_repeat: float = typer.Option(
        4.0, "--max-repeat", metavar="TIMES", help="No row is seen more often; a value keeps 1/TIMES of its share."
    ),
    train_tokens: TrainTokens = None,
    environment: EnvironmentPath = None,
    out: Path | None = typer.Option(
        None, "--out", metavar="FILE", help="Parquet of the mixture; its summary and protocol beside it."
    ),
    distance: str | None = typer.Option(
        None,
        "--distance",
        metavar="SHARE",
        help="Move at most so much of the data between values, e.g. 30%.",
        rich_help_panel=MORE,
    ),
    weights: Path | None = typer.Option(
        None,
        "--weights",
        metavar="FILE",
        help="Parquet of subset_id, row_id, weight, as grasp predict --subsets reads it.",
        rich_help_panel=MORE,
    ),
    protocol: ProtocolFile = None,
    diversity: Diversity = None,
    repeat_worth: RepeatWorth = 15.4,
    cautious: Cautious = False,
) -> None:
    """Find the shares of a label's values that help the targets most.

    The amount of data stays the same.
    """
    opened = grasp.open(art)
    reads = {"--protocol reads": protocol, "is the environment": environment}
    check_outputs({**beside("--out", out), "--weights": weights}, opened.files.reads | reads)
    mixture = opened.mix(
        by,
        target,
        floor=floor,
        cap=cap,
        distance=distance,
        max_repeat=max_repeat,
        train_tokens=train_tokens,
        protocol=protocol,
        diversity=diversity,
        repeat_worth=repeat_worth,
        runs=environment,
        cautious=cautious,
    )
    print(mixture)
    if out is not None:
        print(f"{mixture.save(out)}: the shares; beside it {out.stem}.json, for grasp report --mixture")
    if weights is not None:
        mixture.write_weights(weights)
        print(f"{weights}: the rows and their weights, for grasp predict --subsets")
