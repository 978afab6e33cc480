"""grasp diagnose"""

from pathlib import Path

import typer

import grasp
from grasp.cli.app import MORE, command
from grasp.cli.options import Art, JsonFile, OwnSettings, ProtocolFile, merged
from grasp.files import check_outputs


@command(
    "grasp diagnose art",
    "grasp diagnose art --environment dev --protocol protocol.json --json findings.json",
)
def diagnose(
    art: Art,
    environment: Path | None = typer.Option(
        None, "--environment", metavar="DIR", help="Retrained subsets: do predictions order them rightly?"
    ),
    json_file: JsonFile = None,
    protocol: ProtocolFile = None,
    rows: int = typer.Option(256, "--rows", metavar="N", help="Rows that are looked at.", rich_help_panel=MORE),
    subsets: int = typer.Option(
        64, "--subsets", metavar="N", help="Subsets whose sketches are compared.", rich_help_panel=MORE
    ),
    assignments: OwnSettings = [],
    seed: int = typer.Option(0, "--seed", min=0, metavar="N", help="Seed of the draw of rows.", rich_help_panel=MORE),
) -> None:
    """Check the approximations of an artifact on its own rows.

    Every line says what a healthy value is, and what to change when it is not. Features that were not kept are computed
    again with the model, where it is still there.
    """
    artifact = grasp.open(art)
    read = {"--protocol reads": protocol, "is the environment": environment}
    check_outputs({"--json": json_file}, artifact.files.reads | read)
    found = artifact.diagnose(
        rows=rows, subsets=subsets, seed=seed, runs=environment, protocol=protocol, own=merged(None, assignments, {})
    )
    print(found)
    if json_file is not None:
        found.write_json(json_file)
