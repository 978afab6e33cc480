"""Run `grasp ...` in this process, so that torch is imported once, and return output and exit code."""

import io
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from grasp.artifact.reader import ArtifactReader
from grasp.cli import main

PROGRESS = re.compile(
    r"[\w ]+: [\d,]+ (of [\d,]+ )?rows( in [\d.]+ s)?, .*rows/s.*|runs: [\d,]+ .*|[\w ]+: .* so far|note: .*"
)


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def complaints(self) -> list[str]:
        """Return the lines of stderr that are not progress."""
        return [line for line in self.err.splitlines() if not PROGRESS.fullmatch(line)]


def run(*arguments: object) -> Outcome:
    """Run a command; an exception other than SystemExit propagates, as a traceback would."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    if arguments[:1] == ("build",) and "--add-target" not in arguments:
        arguments = (*arguments, "--untrained")  # the models of the tests are random
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["grasp", *map(str, arguments)])
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Outcome(code, out.getvalue(), err.getvalue())


def succeed(*arguments: object) -> Outcome:
    """Run a command that must succeed without warnings."""
    outcome = run(*arguments)
    assert (outcome.code, outcome.complaints) == (0, []), outcome
    return outcome


def refused(*arguments: object) -> str:
    """Run a command that must exit with code 2 and one line on stderr, and return that line."""
    outcome = run(*arguments)
    assert outcome.code == 2, outcome
    (line,) = outcome.complaints
    assert line == outcome.err.splitlines()[-1]
    assert line.startswith("error: "), line
    return line.removeprefix("error: ")


def arrays(path: Path) -> dict[str, np.ndarray]:
    artifact = ArtifactReader.open(path)
    return {name: np.concatenate([block for _, block in artifact.array_blocks(name)]) for name in artifact.array_names}


def assert_same_arrays(actual: Path, expected: Path) -> None:
    ours, theirs = arrays(actual), arrays(expected)
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


def cells(line: str) -> list[str]:
    """Return the cells of a line of a printed table."""
    return [cell for cell in re.split(r" {2,}", line.strip()) if cell]
