"""A small world shared by all tests of methods, which only read it."""

import pytest

from tests.baselines.world import World, make


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> World:
    """Return an artifact, its reference model with checkpoints, and retraining runs; no test may change them."""
    return make(tmp_path_factory.mktemp("baselines"))
