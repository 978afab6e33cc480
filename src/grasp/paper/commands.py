"""The commands `grasp calibrate` and `grasp controls`: parse options, call a function, print the result."""

from pathlib import Path
from typing import Any

import typer

import grasp
from grasp.cli.app import command, option
from grasp.cli.console import check_outputs, print_evaluation, print_result
from grasp.cli.options import Art, JsonFile, split_names
from grasp.errors import SettingsError
from grasp.files import write_atomically

commands = typer.Typer()  # the entry point of the group `grasp.commands`
SECTION = "Evaluate predictions"  # of `grasp --help`


@command(
    "grasp calibrate art --runs dev-topic --runs dev-source --out protocol.yaml",
    "grasp calibrate --list family.yaml",
    "grasp calibrate art other-art --runs dev --family family.yaml --out protocol.json",
    group=commands,
    section=SECTION,
)
def calibrate(
    paths: list[Path] = typer.Argument(None, metavar="ART", help="Artifacts; each is used for the runs of its corpus."),
    runs: list[Path] = option("--runs DIR", "Development runs to select on; repeatable.", []),
    out: Path | None = option("--out FILE", "File for the selected protocol, .yaml or .json.", None),
    target: str | None = option("--target NAMES", "Targets, separated by commas. Default: all.", None),
    family: Path | None = option(
        "--family FILE", "Candidate protocols. Default: the built-in family, shortened for few subsets.", None
    ),
    listing: Path | None = option("--list FILE", "Write the built-in family as a template, and exit.", None),
) -> None:
    """Select a scoring protocol on retrained subsets.

    Evaluates every protocol of a family on the runs and selects the one with
    the highest lower confidence bound of its mean rank correlation.
    """
    if listing is not None:
        check_outputs({"--list": listing})
        unused = {"ART": paths, "--runs": runs, "--family": family, "--out": out}
        flags = ", ".join(flag for flag, value in unused.items() if value)
        if flags or listing.exists():
            problem = f"cannot be combined with {flags}; drop it" if flags else f"{listing} already exists; remove it"
            raise SettingsError(f"--list: {problem}")
        from grasp.paper.candidates import FAMILY_FILE

        write_atomically(listing, FAMILY_FILE.read_bytes())
        print(f"{listing}: every combination of its lists is one protocol; edit the file and pass it with --family")
        return
    required = {"ART": paths, "--runs": runs, "--out": out}
    missing = [flag for flag, value in required.items() if not value]
    if missing or out is None:
        raise SettingsError(f"calibrate: missing {', '.join(missing)}; see grasp calibrate --help for an example")
    from grasp.paper.calibrate import calibrate as select_protocol
    from grasp.paper.protocol_selection import provenance_path

    arts = [grasp.open(path) for path in paths]
    for art in arts:
        inputs = art.files.protected_paths | {"holds the runs": runs, "--family reads": family}
        check_outputs({"--out": out, "the record of --out": provenance_path(out)}, inputs)
    result = select_protocol(
        arts,
        runs,
        family=family,
        target=split_names(target),
        name=out.stem,
    )
    record = result.save(out)
    print_result(result)
    print(f"{out}: written; record of the selection: {record}")


@command(
    "grasp controls art --runs test --development dev",
    "grasp controls art --runs dev --family family.yaml --json controls.json",
    verb="grasp.paper.controls",
    python="resamples",
    group=commands,
    section=SECTION,
)
def controls(
    art: Art,
    json_file: JsonFile = None,
    **params: Any,
) -> None:
    from grasp.paper.controls import controls as evaluate_controls

    opened = grasp.open(art)
    check_outputs({"--json": json_file}, artifact=opened.files, params=params, streamed=("--json",))
    print_evaluation(evaluate_controls(opened, **params), json_file)
