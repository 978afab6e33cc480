"""grasp serve"""

import sys
from contextlib import suppress
from pathlib import Path

import typer

import grasp
from grasp.cli.app import command
from grasp.cli.options import Art, EnvironmentPath


@command(
    "grasp serve art",
    "grasp serve art --port 0 --environment runs",
    "grasp serve art --mcp",
)
def serve(
    art: Art,
    port: int = typer.Option(
        8765, "--port", min=0, max=65535, metavar="N", help="Port on this machine; 0: any that is free."
    ),
    environment: EnvironmentPath = None,
    model: Path | None = typer.Option(
        None, "--model", metavar="DIR", help="Where the model is now, to explain rows. Default: where it was."
    ),
    mcp: bool = typer.Option(
        False, "--mcp", help="Answer an agent over standard input and output (Model Context Protocol) instead."
    ),
) -> None:
    """Ask anything: the report live in a browser, or the verbs as tools of an agent.

    Nobody else can reach it: it listens on this machine alone, and it only reads the artifact.
    """
    from grasp.report.serve import serve, serve_mcp

    artifact = grasp.open(art).files
    with suppress(KeyboardInterrupt):
        if mcp:
            serve_mcp(artifact, runs=environment, model=model)
        else:
            serve(artifact, port=port, runs=environment, model=model, tell=_tell)
    print("stopped", file=sys.stderr)


def _tell(address: str) -> None:
    print(f"{address} (and {address}ask); stop with Ctrl-C", flush=True)
