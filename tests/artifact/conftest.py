import pytest
from artifact_world import World


@pytest.fixture
def world() -> World:
    return World()
