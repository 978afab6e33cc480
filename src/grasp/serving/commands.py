"""The command `grasp serve`: parse options, call a function."""

import sys
from contextlib import suppress
from typing import Any

import typer

import grasp
from grasp.cli.app import command, option
from grasp.cli.options import Art

commands = typer.Typer()  # the entry point of the group `grasp.commands`


@command(
    "grasp serve art",
    "grasp serve art --port 0 --runs runs",
    "grasp serve art --mcp",
    group=commands,
    verb="grasp.serving.serve",
)
def serve(
    art: Art,
    port: int = option("--port N", "Port on this machine; 0: any free port.", 8765, min=0, max=65535),
    mcp: bool = option("--mcp", "Serve an agent over stdin and stdout (Model Context Protocol) instead.", False),
    **params: Any,
) -> None:
    """Serve a live report to a browser, or tools to an agent.

    The server listens on localhost only, and never writes to the artifact.
    """
    from grasp.serving.serve import serve_mcp

    artifact = grasp.open(art)
    with suppress(KeyboardInterrupt):
        if mcp:
            serve_mcp(artifact.files, **params)
        else:
            grasp.serve(
                artifact,
                port=port,
                on_start=lambda address: print(f"{address}; stop with Ctrl-C", flush=True),
                **params,
            )
    print("stopped", file=sys.stderr)
