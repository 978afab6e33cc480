"""Project files agree with the code: versions, make targets, paths, packages."""

import re
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet as pq
import yaml

import grasp
from grasp.store.checksummed_parquet import CHECKSUM_KEY
from tests.conftest import FIRST_PATHS, SECOND_PATHS

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def workflow_commands() -> str:
    jobs = [job for path in WORKFLOWS for job in yaml.safe_load(path.read_text())["jobs"].values()]
    return "\n".join(step["run"] for job in jobs for step in job["steps"] if "run" in step)


def test_all_files_have_one_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    released = re.findall(r"^## \[(\S+)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[0] == (grasp.__version__, citation["date-released"])
    assert citation["version"] == grasp.__version__
    assert "version" not in re.findall(r'^(\w+) = "', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


def test_stored_tables_of_runs_are_verified_when_they_are_read():
    """A table without the present checksum is read as one of another program."""
    tables = [path for place in ("src/grasp", "experiments") for path in (ROOT / place).rglob("*.parquet")]
    assert len(tables) > 500
    for path in tables:
        assert CHECKSUM_KEY in pq.read_metadata(path).metadata, path


def test_every_named_make_target_exists():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    pages = CONTRIBUTING + (ROOT / "README.md").read_text(encoding="utf-8")
    named_targets = set(
        re.findall(r"\bmake ([\w-]+)", workflow_commands() + "".join(re.findall(r"```bash.*?```", pages, re.S)))
    )
    assert {"test", "test-core", "check", "docs", "coverage"} <= named_targets <= targets


def test_every_supported_python_is_tested():
    (oldest,) = re.findall(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    matrix = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"][0] == oldest
    assert {system.partition("-")[0] for system in matrix["os"]} == {"ubuntu", "macos"}


def test_every_path_in_the_contributing_page_exists():
    named = set(re.findall(r"`([\w/.-]+/[\w.-]*|[\w/]+\.(?:py|md|yaml))`", CONTRIBUTING)) | set(
        re.findall(r"\]\(([\w/.-]+)", CONTRIBUTING)
    )
    places = {name for name in named if "NAME" not in name}
    missing = [
        name
        for name in places
        if not any((base / name).exists() for base in (ROOT, ROOT / "src" / "grasp", ROOT / "docs"))
    ]
    assert len(places) > 15
    assert not missing


def test_contributing_lists_every_package_in_the_order_of_layers():
    listed = re.search(r"before it: (.*?)\.", CONTRIBUTING, re.S)
    assert listed is not None
    packages = [name.strip() for name in listed[1].replace("\n", " ").split(",")]
    contract = re.search(r"^layers = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert contract is not None
    layers = [*dict.fromkeys(re.findall(r"\bgrasp\.(\w+)", contract[1]))][::-1]
    assert packages == [name for name in layers if name in packages]
    assert all(find_spec(f"grasp.{name}") for name in packages)
    assert {name for name in layers if (ROOT / "src/grasp" / name / "__init__.py").exists()} == set(packages)


def test_every_second_path_of_the_tests_exists():
    for name in (*SECOND_PATHS, *FIRST_PATHS):
        file, _, function = name.partition("::")
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert f"def {function.partition('[')[0]}" in text
