"""One small world and one artifact of it, built by the command itself, for all tests that only read."""

import shutil
from pathlib import Path

import pytest

from grasp.yaml_files import write_yaml
from tests.cli.grasp_command import succeed
from tests.extract.world import world


@pytest.fixture(scope="session")
def root(tmp_path_factory) -> Path:
    """model/, corpus.jsonl, facts.jsonl, settings.yaml"""
    place = tmp_path_factory.mktemp("cli")
    write_yaml(world(place).model_dump(mode="json"), place / "settings.yaml")
    return place


@pytest.fixture(scope="session")
def art(root) -> Path:
    """An artifact that no test may change."""
    succeed("build", "--config", root / "settings.yaml", "--out", root / "art")
    return root / "art"


@pytest.fixture
def own_art(art, tmp_path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(art, tmp_path / "art"))
