"""grasp diagnose"""

import json
from pathlib import Path

import typer

from grasp.cli.app import command
from grasp.files import check_outputs, write_whole
from grasp.text import plain

EXAMPLES = """\b
Examples:
  grasp diagnose art
  grasp diagnose art --environment dev --protocol protocol.json --json findings.json
"""


@command(EXAMPLES)
def diagnose(
    path: Path = typer.Argument(..., metavar="ART", help="Directory or URL of the artifact."),
    environment: Path | None = typer.Option(
        None, "--environment", help="Retrained subsets: what K is compared on, and how stable is a ranking?"
    ),
    protocol: Path | None = typer.Option(
        None, "--protocol", help="Protocol file: what selects and predicts; none: the default protocol."
    ),
    rows: int = typer.Option(256, "--rows", help="Rows of the sample."),
    subsets: int = typer.Option(
        64, "--subsets", help="Subsets on which K is compared: the environment's, else halves of the sample."
    ),
    seed: int = typer.Option(0, "--seed", min=0, help="Seed of the sample."),
    json_file: Path | None = typer.Option(None, "--json", help="Findings with their numbers, as JSON."),
) -> None:
    """Check the approximations of an artifact on its own rows.

    Every line says what a healthy value is, and what to change when it is not. Features that were not kept are computed
    again with the model, where it is still there.
    """
    from grasp.artifact.reader import Artifact
    from grasp.audit.diagnose import diagnose as examine
    from grasp.predict.protocol import load_protocol
    from grasp.runs.environment import Environment

    artifact = Artifact.open(path)
    read = {"is the environment": environment, "--protocol reads": protocol}
    check_outputs({"--json": json_file}, artifact.reads | read)
    found = examine(
        artifact,
        rows=rows,
        subsets=subsets,
        seed=seed,
        environment=None if environment is None else Environment.open(environment),
        protocol=None if protocol is None else load_protocol(protocol),
    )
    print(f"{path}: {found.n_rows} rows, {found.n_subsets} {found.compared}, full features from {found.source}")
    for one in found.findings:
        print(plain(f"[{one.verdict}] {one.name}: {one.value}"))
        print("    " + plain(f"healthy: {one.healthy}{f'; change: {one.advice}' if one.advice else ''}"))
    if json_file is not None:
        write_whole(json_file, (json.dumps(found.to_dict(), indent=1) + "\n").encode())
