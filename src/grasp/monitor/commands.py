"""The command `grasp monitor`: print what monitors of trainings stored."""

from pathlib import Path

import typer

from grasp.cli.app import command, option

commands = typer.Typer()  # the entry point of the group `grasp.commands`


@command(
    "grasp monitor out",
    "grasp monitor out --html monitor.html",
    "grasp monitor run-a run-b --out runs.csv",
    group=commands,
    section="Evaluate predictions",
)
def monitor(
    run: list[Path] = typer.Argument(..., metavar="RUN...", help="Output directories of trainings with grasp.Monitor."),
    html: Path | None = option("--html FILE", "Write the page of the last run: tables and curves, offline.", None),
    out: Path | None = option("--out FILE", "Write one line per run, for grasp runs import.", None),
) -> None:
    """Print the losses by source and the effects that grasp.Monitor stored."""
    from grasp.monitor.record import Record, Summary, table_of_runs
    from grasp.results import write_table

    records = [(str(path), Record.read(path)) for path in run]
    for _, record in records:
        print(Summary.of(record))
    if html is not None:
        print(Summary.of(records[-1][1]).write(html))
    if out is not None:
        print(write_table(table_of_runs(records), out))
