"""grasp calibrate"""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from grasp.cli.app import command
from grasp.cli.console import show
from grasp.cli.options import names
from grasp.errors import SettingsError
from grasp.files import check_outputs

if TYPE_CHECKING:
    from grasp.runs.selection import Selection

SHOWN = 10
# \b keeps the lines of the epilog as they are.
EXAMPLES = """\b
Examples:
  grasp calibrate art --environment dev-topic --environment dev-source --out protocol.yaml
  grasp calibrate --list family.yaml
  grasp calibrate art other-art --environment dev --family family.yaml --out protocol.json
"""


@command(EXAMPLES)
def calibrate(
    paths: list[Path] = typer.Argument(
        None, metavar="[ART]...", help="Artifacts; each serves the environments of its corpus."
    ),
    environments: list[Path] = typer.Option([], "--environment", help="Development environment; repeatable."),
    family: Path | None = typer.Option(None, "--family", help="Protocols to choose from; none: those that ship."),
    listing: Path | None = typer.Option(None, "--list", help="Write the family that ships, to be edited, and stop."),
    targets: str | None = typer.Option(None, "--targets", help="Targets, separated by commas; none: all not held out."),
    delta: float = typer.Option(0.05, "--delta", help="The bounds of all protocols hold with probability 1 - delta."),
    resamples: int = typer.Option(1_000, "--resamples", min=10, help="Bootstrap resamples of the subsets."),
    out: Path | None = typer.Option(None, "--out", help="The frozen protocol, .yaml or .json."),
) -> None:
    """Choose a protocol on development environments, and freeze it.

    The protocol with the highest lower confidence bound of its mean task rho, or of the mean rho of units where the
    family says so, is kept.
    """
    if listing is not None:
        check_outputs({"--list": listing})
        _list(listing, paths, environments, family, out)
        return
    missing = [flag for flag, given in (("ART", paths), ("--environment", environments), ("--out", out)) if not given]
    if missing or out is None:
        raise SettingsError(f"calibrate: missing {', '.join(missing)}; see grasp calibrate --help for an example")
    from grasp.artifact.reader import Artifact
    from grasp.predict.protocol import save_protocol
    from grasp.runs.candidates import default_family, load_family
    from grasp.runs.environment import Environment
    from grasp.runs.methods import developments_of
    from grasp.runs.selection import freeze, provenance, provenance_path, select, write_provenance

    artifacts = [Artifact.open(path) for path in paths]
    record_path = provenance_path(out)
    for artifact in artifacts:
        read = artifact.reads | {"is an environment": environments, "--family reads": family}
        check_outputs({"--out": out, "the record of --out": record_path}, read)
    chosen_from = default_family() if family is None else load_family(family)
    developments = developments_of(
        artifacts,
        [Environment.open(path) for path in environments],
        targets=names(targets),
        calibration_subsets=chosen_from.calibration_subsets,
    )
    selection = select(chosen_from, developments, delta=delta, resamples=resamples)
    protocol = freeze(selection, developments, chosen_from, out.stem)
    _print_selection(selection)
    save_protocol(protocol, out)
    write_provenance(provenance(selection, developments, chosen_from), record_path)
    print(f"{out}: protocol {protocol.name}, {protocol.provenance}; how it was chosen: {record_path}")


def _list(listing: Path, paths: list[Path], environments: list[Path], family: Path | None, out: Path | None) -> None:
    idle = {"ART": paths, "--environment": environments, "--family": family, "--out": out}
    if any(idle.values()):
        useless = ", ".join(flag for flag, value in idle.items() if value)
        raise SettingsError(f"calibrate: {useless} has no meaning with --list; leave it out")
    if listing.exists():
        raise SettingsError(f"--list: {listing} is there already; give another name, or remove it")
    from grasp.runs.candidates import write_default_family

    write_default_family(listing)
    print(f"{listing}: every combination of its lists is one protocol; edit it and pass it with --family")


def _print_selection(selection: "Selection") -> None:
    tried = len(selection.scores) + sum(selection.undefined.values())
    left_out = [f"{n:,} have no rho: {why}" for why, n in selection.undefined.items()]
    left_out += [f"{selection.not_served:,} more need arrays that are not there"] if selection.not_served else []
    print(f"{tried:,} protocols on {', '.join(selection.results)}" + "".join(f"; {text}" for text in left_out))
    show(
        f"highest lower confidence bound (mean {selection.criterion} - {selection.z:.2f} standard errors)",
        ("bound", f"mean {selection.criterion}", "se", "text"),
        [
            (f"{score.lcb:+.3f}", f"{score.mean:+.3f}", f"{score.se:.3f}", score.candidate.name)
            for score in selection.scores[:SHOWN]
        ],
        left=0,
    )
    best = selection.best
    lines = [(name, f"{value:+.3f}") for name, value in best.agreement.items()]
    show("the first of them", ("result", selection.criterion), lines)
