"""Runs that failed since `grasp retrain` was last called: of each, `failed/<run>.txt` says why in a line."""

from pathlib import Path

from grasp.errors import ModelError
from grasp.files import discard, write_whole
from grasp.runs.run_tables import Run

DIRECTORY = "failed"


def mark_failed(environment: Path, run: Run, why: str) -> None:
    """Keep why a run failed."""
    (environment / DIRECTORY).mkdir(exist_ok=True)
    write_whole(environment / DIRECTORY / f"{run.stem}.txt", " ".join(why.split()).encode())


def failures(environment: Path) -> dict[str, str]:
    """Why each run failed, by its stem."""
    files = sorted((environment / DIRECTORY).glob("[!.]*.txt"))
    return {file.stem: file.read_text(encoding="utf-8", errors="replace") for file in files}


def forget_failures(environment: Path) -> None:
    """What failed is tried again."""
    discard(environment / DIRECTORY)


def failed_line(environment: Path, total: int) -> str | None:
    """How many runs failed, and why the first of them did; none: no run failed."""
    failed = failures(environment)
    if not failed:
        return None
    stem, why = next(iter(failed.items()))
    again = f"the same command tries {'it' if len(failed) == 1 else 'them'} again"
    return f"{len(failed)} of {total} runs failed, e.g. {stem}: {why}; {again}"


def refuse_all_failed(environment: Path, total: int) -> None:
    """See that not every run failed.

    Raises:
        ModelError: every one did.
    """
    line = failed_line(environment, total)
    if line is not None and len(failures(environment)) == total:
        raise ModelError(f"{environment}: {line}")
