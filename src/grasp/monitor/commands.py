"""The command `grasp monitor`: print what monitors of trainings stored."""

from pathlib import Path

import typer

from grasp.cli.app import command, option

commands = typer.Typer()  # the entry point of the group `grasp.commands`


@command(
    "grasp monitor out",
    "grasp monitor out --out monitor.html",
    "grasp monitor run-a run-b --out runs.csv",
    group=commands,
    section="Evaluate predictions",
)
def monitor(
    run: list[Path] = typer.Argument(..., metavar="RUN...", help="Output directories of trainings with grasp.Monitor."),
    out: Path | None = option(
        "--out FILE", "Write the page of the last run as .html, or a line per run as .parquet or .csv.", None
    ),
) -> None:
    """Print the losses by source and the effects that grasp.Monitor stored."""
    from grasp.monitor.record import MonitorRecord, summarise, table_of_runs
    from grasp.results import write_table

    records = [(str(path), MonitorRecord.read(path)) for path in run]
    summaries = [summarise(record) for _, record in records]
    print(*summaries, sep="\n\n")
    if out is not None:
        print(summaries[-1].write(out) if out.suffix == ".html" else write_table(table_of_runs(records), out))
