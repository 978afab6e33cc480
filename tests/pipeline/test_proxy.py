"""A build without a checkpoint trains a proxy model that is resumable, reused, and kept for later targets."""

import pytest
from transformers import AutoModelForCausalLM

from grasp.artifact.inspection import verify
from grasp.artifact.reader import ArtifactReader
from grasp.errors import CorpusError, TargetError
from grasp.pipeline import proxy
from grasp.pipeline.add_targets import add_targets
from grasp.pipeline.build import build
from grasp.pipeline.forecast import forecast
from grasp.training.fine_tuning_recipe import default_proxy_recipe
from tests.faults import Killed, raising
from tests.mentions import assert_mentions
from tests.pipeline.test_pipeline import Notes
from tests.pipeline.world import world, write_targets


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(
        proxy, "default_proxy_recipe", lambda n: default_proxy_recipe(n).model_copy(update={"max_steps": 8})
    )


@pytest.fixture(scope="module")
def inputs(root):
    chosen = world(root, n_rows=12)
    settings = {"model": {"threads": 1}, "corpus": {"max_length": 48, "shortest_end": 1}}
    paths = {"corpus": chosen.corpus.path, "targets": chosen.targets.names[0]}
    return {**paths, "settings": settings, "untrained": True}


def test_a_corpus_and_targets_are_sufficient(inputs, root, tmp_path, monkeypatch):
    notes = Notes()
    out = tmp_path / "art"
    artifact = build(out=out, **inputs, progress=notes)
    assert_mentions("\n".join(notes.lines), "no --model: a model of 3 layers", "8 steps of 12 rows")
    assert artifact.manifest.settings["train"] == "new"
    assert artifact.manifest.settings["model"]["path"] == str(out / "model")
    assert "relevance_knn" in artifact.array_names
    assert verify(out).ok
    write_targets(tmp_path / "more.jsonl", task="more", n_units=2, seed=5)
    add_targets(out, str(tmp_path / "more.jsonl"))
    assert ArtifactReader.open(out).targets == ("facts", "more")

    def interrupted(nth):
        place = tmp_path / f"killed-{nth}"
        with pytest.raises(Killed), raising(monkeypatch, "replace", nth, Killed()):
            build(out=place, **inputs)
        build(out=place, **inputs)
        return (place / "model" / "model.safetensors").read_bytes()

    for nth in (3, 12, 20):
        assert interrupted(nth) == (out / "model" / "model.safetensors").read_bytes()


def test_a_tokenizer_that_is_passed_becomes_that_of_the_model(inputs, root, tmp_path):
    build(out=tmp_path / "art", **inputs, tokenizer=str(root / "model"))
    assert not (tmp_path / "art" / "tokenizer").exists()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "art" / "model")
    assert model.config.max_position_embeddings == 48
    assert (tmp_path / "art" / "model" / "tokenizer.json").exists()


def test_invalid_inputs_are_refused_before_training(inputs, root, tmp_path, monkeypatch):
    monkeypatch.setattr("grasp.pipeline.proxy.train", None)
    with pytest.raises(TargetError, match=r"nothing\.jsonl"):
        build(out=tmp_path / "art", **{**inputs, "targets": str(tmp_path / "nothing.jsonl")})
    monkeypatch.undo()
    ids = tmp_path / "ids.jsonl"
    ids.write_text('{"input_ids": [1, 2, 3]}\n')
    with pytest.raises(CorpusError, match="token ids or conversations"):
        build(out=tmp_path / "other", **{**inputs, "corpus": str(ids)})


def test_a_forecast_without_a_model_contains_its_training(inputs, tmp_path):
    settings = inputs["settings"]
    corpus = settings["corpus"] | {"path": inputs["corpus"]}
    report = forecast(
        tmp_path / "art", {**settings, "corpus": corpus, "targets": {"names": [inputs["targets"]], "max_length": 48}}
    )
    lines = report.splitlines()
    assert lines[0].startswith("12 rows ")
    assert_mentions(lines[1], "at the present load of")
    assert not (tmp_path / "art").exists()
