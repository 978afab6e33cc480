"""grasp predict"""

from pathlib import Path

import typer

import grasp
from grasp.cli.app import MORE, command
from grasp.cli.console import tell
from grasp.cli.options import (
    Art,
    EnvironmentPath,
    ProtocolFile,
    ResultFile,
    TargetNames,
    distinct_names,
)
from grasp.files import check_outputs


@command(
    "grasp predict art --by topic --target sciq",
    "grasp predict art --drop \"topic = 'Games' AND format != 'FAQs'\"",
    "grasp predict art --weight \"topic = 'Games': 0.3\" --weight \"topic = 'Health': 2\"",
    "grasp predict art --subsets subsets.parquet --out predictions.parquet",
    "grasp predict art --by topic --environment dev",
)
def predict(
    art: Art,
    by: str | None = typer.Option(None, "--by", metavar="LABEL", help="What dropping each value of a label does."),
    drop: str | None = typer.Option(
        None, "--drop", metavar="EXPR", help="Drop the rows for which it is true, e.g. \"topic = 'Games'\"."
    ),
    keep: str | None = typer.Option(None, "--keep", metavar="EXPR", help="Keep only the rows for which it is true."),
    weight: list[str] = typer.Option(
        [], "--weight", metavar="EXPR:NUMBER", help="Weight of the rows for which it is true, 1 for others; repeatable."
    ),
    subsets: Path | None = typer.Option(
        None, "--subsets", metavar="FILE", help="Many subsets at once: Parquet of row_id[, subset_id, weight]."
    ),
    target: TargetNames = None,
    environment: EnvironmentPath = None,
    out: ResultFile = None,
    protocol: ProtocolFile = None,
    omitted: bool = typer.Option(
        False, "--omitted", help="The subsets of --subsets name the rows that are left out.", rich_help_panel=MORE
    ),
    family: str | None = typer.Option(
        None, "--family", help="Draw subsets: uniform:F, bernoulli:Q, mixture:L or groups:L.", rich_help_panel=MORE
    ),
    count: int = typer.Option(100, "-B", min=1, metavar="N", help="Subsets drawn with --family.", rich_help_panel=MORE),
    seed: int = typer.Option(0, "--seed", min=0, metavar="N", help="Seed of that draw.", rich_help_panel=MORE),
    units: bool = typer.Option(False, "--units", help="A line for every unit as well.", rich_help_panel=MORE),
    components: bool = typer.Option(
        False, "--components", help="The level, and what each part of the prediction adds.", rich_help_panel=MORE
    ),
) -> None:
    """What happens to a target if rows are dropped, kept or re-weighted?

    The change against the whole corpus, 0 = the corpus, higher is better.
    """
    from grasp.verbs.predict import parse_weights

    weights = parse_weights(weight, "--weight")
    artifact = grasp.open(art)
    read = {"--subsets reads": subsets, "--protocol reads": protocol, "is the environment": environment}
    check_outputs({"--out": out}, artifact.files.reads | read)
    result = artifact.predict(
        drop=drop,
        keep=keep,
        weight=weights or None,
        by=by,
        subsets=subsets,
        omitted=omitted,
        family=family,
        count=count,
        seed=seed,
        target=distinct_names("--target", target),
        protocol=protocol,
        runs=environment,
        components=components,
        units=units,
        out=out,
    )
    tell(result, out, written=result.lines)
