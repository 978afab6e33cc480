import os

import pytest
from artifact_world import World


@pytest.fixture(autouse=True)
def no_flush(monkeypatch):
    """Disable fsync, which only matters on power loss and doubles the time of the tests."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def world() -> World:
    return World()
