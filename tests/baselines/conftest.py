"""One small world for all tests of methods that only read it."""

import pytest

from tests.baselines.world import World, make


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> World:
    """An artifact, its reference model with checkpoints, and an environment; no test may change them."""
    return make(tmp_path_factory.mktemp("baselines"))
