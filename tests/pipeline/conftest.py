"""One small world for the builds of a file."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("world")
