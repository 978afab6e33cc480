"""Every command on the pages of the site is valid."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from grasp.artifact import manifest
from grasp.cli import app
from grasp.distil import scorer
from grasp.runs import training_runs
from grasp.select.objective import SUMMARY_VERSION

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WRITTEN = [page for page in PAGES if page.name not in ("paper_map.md", "surface.md")]  # names, and a generated page


def test_format_versions_are_those_of_the_code():
    text = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    table = {
        name: int(version) for name, version in re.findall(r"^\| ([\w, ]+) \| .*? \| (\d+) \|", text, re.MULTILINE)
    }
    assert table == {
        "artifact": manifest.FORMAT_VERSION,
        "retrained runs, imported runs": training_runs.FORMAT_VERSION,
        "scorer": scorer.FORMAT_VERSION,
        "selection, mixture": SUMMARY_VERSION,
    }


def commands(page: Path) -> list[list[str]]:
    """Return the lines of fenced or indented code blocks that begin with grasp, as argv."""
    text = page.read_text(encoding="utf-8")
    fenced = re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^    (grasp .*)$", text, re.MULTILINE)
    lines = "\n".join([*fenced, *indented]).replace("\\\n", " ").splitlines()
    every = [shlex.split(line.partition(" > ")[0], comments=True) for line in lines]  # the shell takes the rest
    return [argv for argv in every if argv and argv[0] == "grasp"]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_every_command_is_valid(page):
    group = typer.main.get_command(app)
    for argv in commands(page):
        group.commands[argv[1]].make_context(argv[1], argv[2:])  # or it says what it does not know
