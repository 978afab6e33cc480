"""The command `grasp calibrate`: parse options, call `grasp.calibrate`, print the result."""

from pathlib import Path

import typer

import grasp
from grasp.cli.app import command, option, rare
from grasp.cli.console import check_outputs, print_result
from grasp.cli.options import split_names
from grasp.errors import SettingsError


@command(
    "grasp calibrate art --runs dev-topic --runs dev-source --out protocol.yaml",
    "grasp calibrate --list family.yaml",
    "grasp calibrate art other-art --runs dev --family family.yaml --out protocol.json",
)
def calibrate(
    paths: list[Path] = typer.Argument(None, metavar="[ART]...", help="Artifacts; each serves the runs of its corpus."),
    runs: list[Path] = option("--runs DIR", "Development runs to choose on; repeatable.", []),
    out: Path | None = option("--out FILE", "The chosen protocol, .yaml or .json.", None),
    target: str | None = option("--target NAMES", "Targets, separated by commas. Default: all.", None),
    family: Path | None = option(
        "--family FILE", "Protocols to choose from. Default: those that ship, few where there are few subsets.", None
    ),
    listing: Path | None = option("--list FILE", "Write the protocols that ship, to be edited, and stop.", None),
    delta: float = rare("--delta SHARE", "Chance that the bound of any protocol is wrong.", 0.05),
    resamples: int = rare("--resamples N", "Bootstrap resamples of the subsets.", 1_000, min=10),
) -> None:
    """Choose a protocol on retrained subsets, and freeze it.

    Many ways to add up relevance are tried. The one is kept that predicts the
    runs best, with a margin for luck: the highest lower confidence bound of its
    mean rank correlation.
    """
    if listing is not None:
        check_outputs({"--list": listing})
        idle = {"ART": paths, "--runs": runs, "--family": family, "--out": out}
        if any(idle.values()):
            useless = ", ".join(flag for flag, value in idle.items() if value)
            raise SettingsError(f"calibrate: {useless} has no meaning with --list; leave it out")
        if listing.exists():
            raise SettingsError(f"--list: {listing} is there already; give another name, or remove it")
        from grasp.geometry.candidates import write_default_family

        write_default_family(listing)
        print(f"{listing}: every combination of its lists is one protocol; edit it and pass it with --family")
        return
    required = {"ART": paths, "--runs": runs, "--out": out}
    missing = [flag for flag, value in required.items() if not value]
    if missing or out is None:
        raise SettingsError(f"calibrate: missing {', '.join(missing)}; see grasp calibrate --help for an example")
    from grasp.geometry.calibration_result import provenance_path

    arts = [grasp.open(path) for path in paths]
    for art in arts:
        read = art.files.reads | {"holds the runs": runs, "--family reads": family}
        check_outputs({"--out": out, "the record of --out": provenance_path(out)}, read)
    result = grasp.calibrate(
        arts,
        runs,
        family=family,
        target=split_names(target),
        delta=delta,
        resamples=resamples,
        name=out.stem,
    )
    record = result.save(out)
    print_result(result)
    print(f"{out}: written; how it was chosen: {record}")
