"""grasp report"""

import shlex
import sys
from pathlib import Path

import typer

from grasp.cli.app import command
from grasp.cli.options import distinct_names
from grasp.files import check_outputs
from grasp.text import size_text

# \b keeps the lines of the epilog as they are.
EXAMPLES = """\b
Examples:
  grasp report art --out report.html
  grasp report art --environment dev --selection kept.json --mixture mixture.json --out report.html
  grasp report art --detect suspects.parquet --out report.html
  grasp report step-3000 --previous step-1000 --previous step-2000 --by topic --out report.html
"""


@command(EXAMPLES)
def report(
    path: Path = typer.Argument(..., metavar="ART", help="Directory or URL of the artifact."),
    out: Path = typer.Option(..., "--out", help="HTML file to write; it needs no network."),
    by: str | None = typer.Option(
        None, "--by", metavar="LABELS", help="Labels, separated by commas; none: text labels of 2 to 100 values."
    ),
    targets: str | None = typer.Option(None, "--targets", help="Targets, separated by commas; none: all."),
    protocol: Path | None = typer.Option(None, "--protocol", help="Protocol file; none: the one that ships."),
    environment: Path | None = typer.Option(
        None, "--environment", help="Directory of retrained subsets, to say how far to trust the predictions."
    ),
    partial: bool = typer.Option(False, "--partial", help="Use what an unfinished environment has."),
    selection: Path | None = typer.Option(None, "--selection", help="JSON that grasp select wrote beside its --out."),
    mixture: Path | None = typer.Option(None, "--mixture", help="JSON that grasp mix wrote beside its --out."),
    suspects: Path | None = typer.Option(None, "--detect", help="Parquet that grasp detect wrote with --out."),
    previous: list[Path] = typer.Option(
        [], "--previous", help="Artifact of an earlier checkpoint on the same corpus, oldest first; repeatable."
    ),
) -> None:
    """Write one HTML page of findings, with a live what-if.

    Slices with intervals, interactions, rows with their text, sliders that predict what grasp predict predicts.
    """
    from grasp.artifact.reader import Artifact
    from grasp.predict.protocol import default_protocol, load_protocol
    from grasp.report.findings import Question, findings
    from grasp.report.page import write_report
    from grasp.runs.environment import Environment

    artifact = Artifact.open(path)
    read = {"--selection": selection, "--mixture": mixture, "--detect": suspects, "--protocol": protocol}
    read |= {"--environment": environment}
    known = {f"{flag} reads": file for flag, file in read.items()} | {"--previous reads": previous}
    check_outputs({"--out": out}, artifact.reads | known)
    question = Question(
        targets=distinct_names("--targets", targets),
        by=distinct_names("--by", by) or (),
        previous=[Artifact.open(place) for place in previous],
        environment=None if environment is None else Environment.open(environment),
        partial=partial,
        selection=selection,
        mixture=mixture,
        suspects=suspects,
        protocol_path=protocol,
        command=shlex.join(["grasp", *sys.argv[1:]]),
    )
    chosen = default_protocol() if protocol is None else load_protocol(protocol)
    size = write_report(findings(artifact, chosen, question), out)
    print(f"{out}: {size_text(size)}; open it in any browser, it needs no network")
