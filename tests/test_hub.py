"""Missing names: a misspelt path is an immediate error; a hub that does not respond is contacted once."""

import time

import pytest
from huggingface_hub import constants

from grasp import hub
from grasp.corpus.sources import open_source
from grasp.errors import CorpusError, ModelError
from grasp.models.checkpoint import load_causal_lm
from grasp.settings import ModelSettings


@pytest.fixture
def nobody(tmp_path, monkeypatch):
    """Make the hub refuse connections, and change to an empty directory."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    hub.unreachable.cache_clear()
    yield tmp_path
    hub.unreachable.cache_clear()


def test_a_misspelt_path_is_refused_with_a_suggestion(nobody):
    (nobody / "models/ckpt").mkdir(parents=True)
    with pytest.raises(ModelError, match=r"`models/cktp`: .*'ckpt'.*checkpoint"):
        load_causal_lm(ModelSettings(path="models/cktp"), None)
    with pytest.raises(CorpusError, match=r"models/cktp: .*'ckpt'.*\.parquet"):
        open_source("models/cktp")
    (nobody / "corpus.parquet").touch()
    assert hub.suggest_path("corpsu.parquet") == " (did you mean 'corpus.parquet'?)"
    assert [hub.suggest_path(name) for name in ("gone.parquet", "corpsu.jsonl", "no/corpus.parquet")] == ["", "", ""]


def test_a_hub_that_does_not_respond_is_contacted_once(nobody, monkeypatch):
    (nobody / "ckpt").mkdir()
    begun = time.monotonic()
    why = r"http://127.0.0.1:9 does not answer \(.*refused\); HF_HUB_OFFLINE=1 uses cached files only"
    with pytest.raises(ModelError, match=rf"`cktp`.*'ckpt'.*: {why}"):
        load_causal_lm(ModelSettings(path="cktp"), None)
    with pytest.raises(CorpusError, match=rf"cktp: .*'ckpt'.*hub.*: {why}"):
        open_source("cktp")
    assert time.monotonic() - begun < 10  # the libraries would go on for most of a minute
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.unreachable.cache_clear()
    assert hub.unreachable() is None  # the libraries have caches
