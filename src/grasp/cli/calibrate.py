"""grasp calibrate"""

from pathlib import Path

import typer

import grasp
from grasp.cli.app import MORE, command
from grasp.cli.console import tell
from grasp.cli.options import Resamples, TargetNames, names
from grasp.errors import SettingsError
from grasp.files import check_outputs


@command(
    "grasp calibrate art --environment dev-topic --environment dev-source --out protocol.yaml",
    "grasp calibrate --list family.yaml",
    "grasp calibrate art other-art --environment dev --family family.yaml --out protocol.json",
)
def calibrate(
    paths: list[Path] = typer.Argument(
        None, metavar="[ART]...", help="Artifacts; each serves the environments of its corpus."
    ),
    environments: list[Path] = typer.Option(
        [], "--environment", metavar="DIR", help="Development environment to choose on; repeatable."
    ),
    out: Path | None = typer.Option(None, "--out", metavar="FILE", help="The chosen protocol, .yaml or .json."),
    target: TargetNames = None,
    family: Path | None = typer.Option(
        None,
        "--family",
        metavar="FILE",
        help="Protocols to choose from. Default: those that ship, few where there are few subsets.",
    ),
    listing: Path | None = typer.Option(
        None, "--list", metavar="FILE", help="Write the protocols that ship, to be edited, and stop."
    ),
    delta: float = typer.Option(
        0.05,
        "--delta",
        metavar="SHARE",
        help="Chance that the bound of any protocol is wrong.",
        rich_help_panel=MORE,
    ),
    resamples: Resamples = 1_000,
) -> None:
    """Choose a protocol on retrained subsets, and freeze it.

    Many ways to add up relevance are tried. The one is kept that predicts the
    runs best, with a margin for luck: the highest lower confidence bound of its
    mean rank correlation.
    """
    if listing is not None:
        check_outputs({"--list": listing})
        _list(listing, paths, environments, family, out)
        return
    missing = [flag for flag, given in (("ART", paths), ("--environment", environments), ("--out", out)) if not given]
    if missing or out is None:
        raise SettingsError(f"calibrate: missing {', '.join(missing)}; see grasp calibrate --help for an example")
    from grasp.runs.selection import provenance_path

    arts = [grasp.open(path) for path in paths]
    for art in arts:
        read = art.files.reads | {"is an environment": environments, "--family reads": family}
        check_outputs({"--out": out, "the record of --out": provenance_path(out)}, read)
    result = grasp.calibrate(
        arts,
        environments,
        family=family,
        target=names(target),
        delta=delta,
        resamples=resamples,
        name=out.stem,
    )
    record = result.save(out)
    tell(result)
    print(f"{out}: written; how it was chosen: {record}")


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
