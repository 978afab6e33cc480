"""What all tests share: the choice of slow ones, a small disk, and a small artifact."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says something about the machine, nothing about the law.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
os.environ["OMP_NUM_THREADS"] = "1"  # read by torch; for tiny models several threads are slower
os.environ.pop("COLUMNS", None)  # of workers of xdist: tables are those of a pipe

# One path each of a browser, of kills and of real tokenizers is for every day; these others are slow. Files that list
# their own slow tests are not named here.
SECOND_PATHS = (
    "models/test_real_tokenizers.py::",
    "pipeline/test_add_replay.py::test_a_replay_killed_at_any_replace_resumes_to_the_same_bytes",
    "pipeline/test_warm_up.py::test_killed_at_any_moment_it_goes_on_to_the_same_bytes",
    "report/test_browser.py::",
    "retraining/test_worker.py::test_killed_in_the_middle_another_worker_takes_over",
)
FIRST_PATHS = (
    "models/test_real_tokenizers.py::test_the_loss_of_a_unit_is_that_of_its_tokens_in_the_whole_text[mistral]",
    "models/test_real_tokenizers.py::test_rows_and_units_have_the_same_tokens_and_loss[mistral]",
    "models/test_real_tokenizers.py::test_rows_and_units_have_the_same_tokens_and_loss[deepseek]",
    "report/test_browser.py::test_nothing_of_the_corpus_runs",
    "report/test_browser.py::test_sliders_moved_by_keyboard_and_mouse_say_what_predict_says",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if name.startswith(SECOND_PATHS) and not name.startswith(FIRST_PATHS):
            item.add_marker(pytest.mark.slow)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-snapshots", action="store_true", help="rewrite recorded numbers and help")


@pytest.fixture(scope="session", autouse=True)
def no_flush():
    """Disable fsync, which only matters on power loss and takes longer than what is flushed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that installs a package of one module with entry points, in the layout of pip."""

    def installed(module: str, source: str, points: str, package: str | None = None) -> Path:
        package = package or module
        site = tmp_path / package
        record = site / f"{package}-1.0.dist-info"
        record.mkdir(parents=True)
        (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (record / "entry_points.txt").write_text(points)
        (site / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(site)
        return site

    return installed


@pytest.fixture(scope="session")
def rewrite_snapshots(request: pytest.FixtureRequest) -> bool:
    """Return whether recorded files are rewritten instead of compared."""
    return bool(request.config.getoption("--rewrite-snapshots"))


@pytest.fixture
def small_disk(tmp_path):
    """Return a function that mounts a disk of some kilobytes, or enlarges it if called again."""
    place = tmp_path / "disk"
    place.mkdir()

    def sized(kilobytes: int) -> Path:
        options = f"size={kilobytes}k" + (",remount" if place.is_mount() else "")
        mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
            pytest.skip("mounting a small disk needs root")
        return place

    yield sized
    if place.is_mount():
        subprocess.run(["umount", str(place)], check=True)


@pytest.fixture(scope="session")
def root(tmp_path_factory) -> Path:
    """Write a small world: model/, corpus.jsonl, facts.jsonl, settings.yaml."""
    from grasp.yaml_files import write_yaml  # noqa: PLC0415  (pytest-xdist's first process needs no torch)
    from tests.pipeline.world import SKETCHES, world  # noqa: PLC0415

    place = tmp_path_factory.mktemp("cli")
    features = {"kernels": ("output_layer", "embedding", "knn", "pooled", *SKETCHES)}
    write_yaml(world(place, features=features).model_dump(mode="json"), place / "settings.yaml")
    return place


@pytest.fixture(scope="session")
def art(root) -> Path:
    """Build the artifact of the world with the command; no test may change it."""
    from tests.cli.grasp_command import succeed  # noqa: PLC0415

    succeed("build", "--config", root / "settings.yaml", "--out", root / "art")
    return root / "art"
