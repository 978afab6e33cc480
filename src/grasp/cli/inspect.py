"""grasp info, grasp verify"""

from pathlib import Path

import typer

from grasp.cli.app import command
from grasp.cli.console import show
from grasp.text import json_text, size_text, skipped_text


@command("grasp info art")
def info(
    path: Path = typer.Argument(..., metavar="ART", help="Directory or URL of the artifact; or a scorer."),
    as_json: bool = typer.Option(False, "--json", help="Everything, as JSON."),
) -> None:
    """Print what is in an artifact, or how good a scorer is."""
    from grasp.artifact.inspection import info as describe
    from grasp.artifact.remote import remote_url
    from grasp.choose.scorer import is_scorer, read_card
    from grasp.errors import ArtifactError
    from grasp.files import kind_of

    if is_scorer(path):
        card = read_card(path)
        print(json_text(card.model_dump(mode="json")) if as_json else card)
        return
    try:
        found = describe(path)
    except ArtifactError as err:
        if remote_url(path) is not None or kind_of(path) != "nothing":
            raise
        raise ArtifactError(f"{err}; a scorer is there once `grasp distil` has ended") from err
    if as_json:
        print(json_text(found.to_dict()))
        return
    state = "complete" if found.complete else f"{found.finished_shards} of {found.n_shards} shards finished"
    print(
        f"{found.path}: {state}, format {found.format_version}, {found.n_rows:,} rows, {size_text(found.bytes_total)}"
    )
    for name, value in {**found.made_by, **{f"{key} fingerprint": v for key, v in found.fingerprints.items()}}.items():
        print(f"  {name}: {value}")
    print("targets: " + ", ".join(f"{name} ({units} units)" for name, units in found.targets.items()))
    show(
        "arrays",
        ("array", "dtype", "shape", "size", "bytes a row"),
        [
            (a.name, a.dtype, f"{a.shape[0]} x {a.shape[1]}", size_text(a.bytes), f"{a.bytes_per_row:.0f}")
            for a in found.arrays
        ],
    )
    rest = ", ".join(f"{kind} {size_text(size)}" for kind, size in found.bytes.items() if kind != "arrays")
    print(f"beside the arrays: {rest}; {found.bytes_per_row:,.0f} bytes a row in all")
    if counts := found.skipped.get("rows", {}).get("counts"):
        print(f"left out: {skipped_text(counts)}")
    if found.extension_in_progress is not None:
        print(f"targets are being added: {found.extension_in_progress} finished")


@command("grasp verify art")
def verify(
    path: Path = typer.Argument(..., metavar="ART", help="Directory or URL of the artifact; or a scorer."),
) -> None:
    """Compare every file of an artifact with its checksum, or of a scorer.

    Exit code 1 if anything is broken; every broken file is named.
    """
    from grasp.artifact.inspection import verify as check
    from grasp.choose.scorer import Scorer, is_scorer
    from grasp.errors import ArtifactError

    if is_scorer(path):
        try:
            Scorer.open(path)  # reads and compares all of it
        except ArtifactError as err:
            print(f"broken: {err}")
            raise typer.Exit(code=1) from err
        print(f"{path}: scorer, all whole")
        return
    report = check(path)
    for problem in report.problems:
        print(f"broken: {problem}")
    what = "artifact" if report.complete else "unfinished artifact"
    verdict = "all whole" if report.ok else f"{len(report.problems)} broken"
    print(f"{report.path}: {what}, {report.n_files:,} files, {size_text(report.n_bytes)}: {verdict}")
    if not report.ok:
        raise typer.Exit(code=1)
