import os

import pytest
from artifact_world import World


@pytest.fixture(autouse=True)
def no_flush(monkeypatch):
    """Flushing shows only when the power fails, which no test can do; without it they take half the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def world() -> World:
    return World()
