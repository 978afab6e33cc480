"""A corpus of conversations from build to export: only the assistant's tokens carry loss, on every engine."""

import json
import shutil
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers.utils import chat_template_utils

import grasp
from grasp.artifact.reader import ArtifactReader
from grasp.corpus.conversations import Conversation
from grasp.corpus.row_store import RowStore
from grasp.merging.merge import merge
from grasp.models.build_source import BuildSource, load_reference
from grasp.pipeline.add_targets import add_targets
from grasp.pipeline.pipeline import build_artifact
from grasp.settings import BuildSettings, TargetSettings, build_settings
from tests.cli.grasp_command import arrays
from tests.corpus.chats import CHATML, turns
from tests.corpus.world import write_jsonl
from tests.mentions import assert_mentions
from tests.pipeline.test_pipeline import Notes
from tests.pipeline.world import WORDS, changed, world, write_targets
from tests.rounding import rounding


def conversations(n: int) -> list[dict]:
    rng = np.random.default_rng(3)
    lines = [
        [" ".join(rng.choice(WORDS, size=int(rng.integers(2, 6)))) for _ in range(2 + 2 * (i % 2))] for i in range(n)
    ]
    return [{"id": f"c{i}", "messages": turns(*words), "topic": "ab"[i % 2], "n": [i]} for i, words in enumerate(lines)]


def chat_settings(root: Path) -> BuildSettings:
    settings = world(root, features={"sample_positions": 10_000})
    template = json.loads((root / "model" / "tokenizer_config.json").read_text())
    (root / "model" / "tokenizer_config.json").write_text(json.dumps(template | {"chat_template": CHATML}))
    path = str(write_jsonl(root / "corpus.jsonl", conversations(20)))
    return build_settings(settings.model_dump() | {"corpus": {"path": path, "max_length": 120}})


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    root, notes = tmp_path_factory.mktemp("chat"), Notes()
    settings = chat_settings(root)
    build_artifact(settings, root / "art", progress=notes)
    # its questions are no conversations
    assert_mentions(notes.lines, "chat template")
    return root, settings


def test_loss_and_relevance_are_those_of_the_assistants_tokens(chat):
    root, settings = chat
    art = ArtifactReader.open(root / "art")
    model, store = load_reference(settings.model), BuildSource(art).rows
    rows = store.rows(np.arange(store.n_rows))
    loss = np.concatenate([np.asarray(batch.column("loss")) for batch in art.row_batches(["loss"])])
    for i in range(store.n_rows):
        ids, mask = torch.from_numpy(rows.ids(i).astype(np.int64)), rows.mask(i)
        assert mask is not None
        assert 0 < mask.sum() < len(ids) - 1
        losses = torch.nn.functional.cross_entropy(
            model.model(input_ids=ids[None]).logits[0, :-1], ids[1:], reduction="none"
        )
        # features are those of the tail of 32 and of all supervised positions, so the mean is over all of them
        assert loss[i] == pytest.approx(losses[torch.from_numpy(mask[1:])].mean().item(), rel=1e-4)
    assert int(art.moments["hidden.count"][0]) == store.loss_counts().sum()


def test_short_conversations_are_recognised_by_the_tokens_that_carry_loss(chat):
    art = grasp.open(chat[0] / "art")
    loss_counts_N = RowStore.open(chat[0] / "art" / "tokens").loss_counts()
    rows = art.rows.to_pandas()
    assert rows["n_loss"].tolist() == loss_counts_N.tolist()
    assert "n_loss" not in art.labels
    median = int(np.median(loss_counts_N))
    assert median < rows["n_tokens"].min()  # which would pass over nothing
    frame = art.score(next(iter(art.targets)), min_tokens=median).to_pandas()
    assert set(frame["row_id"]) == set(rows["row_id"][loss_counts_N >= median])


def test_an_artifact_of_plain_text_merges_with_one_of_conversations(chat, tmp_path):
    root, settings = chat
    lines = [{"id": f"t{i}", "text": " ".join(WORDS[i : i + 6])} for i in range(5)]
    path = str(write_jsonl(tmp_path / "text.jsonl", lines))
    build_artifact(changed(settings, corpus={"path": path}, like=str(root / "art")), tmp_path / "text")
    both = grasp.open(merge([root / "art", tmp_path / "text"], tmp_path / "both").path)
    supervised = [RowStore.open(part / "tokens").loss_counts() for part in (root / "art", tmp_path / "text")]
    assert both.rows.to_pandas()["n_loss"].tolist() == np.concatenate(supervised).tolist()
    assert len(both.score(next(iter(both.targets)), min_tokens=1).to_pandas()) == len(np.concatenate(supervised))


def test_an_added_target_has_the_relevance_of_a_joint_build(chat, tmp_path):
    root, settings = chat
    names = (*settings.targets.names, str(write_targets(root / "more.jsonl", "more", 4, seed=5)))
    build_artifact(changed(settings, targets={"names": names}), tmp_path / "joint")
    build_artifact(settings, tmp_path / "art")
    assert add_targets(tmp_path / "art", TargetSettings(names=names[1:], max_length=64)) == "pass"
    actual, expected = (arrays(tmp_path / name)["relevance_output_layer"] for name in ("art", "joint"))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_an_export_holds_the_users_own_records(chat, tmp_path, kind):
    picked = grasp.open(chat[0] / "art").select("50%")
    picked.export(tmp_path / "out", format=kind)
    results = []
    for file in sorted((tmp_path / "out").glob("part-*")):
        read = pq.read_table(file).to_pylist() if kind == "parquet" else map(json.loads, file.read_text().splitlines())
        results.extend(read)
    names = set(picked.table["row_id"].to_pylist())
    assert results == [record for record in conversations(20) if record["id"] in names]


def test_the_same_answers_have_the_same_loss_as_rows_and_as_questions(chat, tmp_path):
    unit_lines = [{"unit_id": line["id"], "messages": line["messages"]} for line in conversations(20)]
    targets = {"names": (str(write_jsonl(tmp_path / "same.jsonl", unit_lines)),), "max_length": 120}
    build_artifact(changed(chat[1], targets=targets, corpus={"loss_on": "completion"}), tmp_path / "art")
    art = ArtifactReader.open(tmp_path / "art")
    rows = pa.Table.from_batches(list(art.row_batches(["row_id", "loss"]))).to_pylist()
    units = {unit["unit_id"]: unit["loss"] for unit in art.units.to_pylist()}
    assert {row["row_id"] for row in rows} == set(units)
    result = np.array([units[row["row_id"]] for row in rows])
    # the same tokens in batches of other widths: float32 sums over 16 to 32 hidden numbers and 300 logits
    np.testing.assert_allclose(result, [row["loss"] for row in rows], rtol=0, atol=rounding(700, result))


def test_a_chat_template_with_the_date_is_exported_and_resumed_on_another_day(chat, tmp_path, monkeypatch):
    root, settings = chat
    model = Path(shutil.copytree(root / "model", tmp_path / "model"))
    (file,) = [path for path in (model / "chat_template.jinja", model / "tokenizer_config.json") if path.exists()][-1:]
    known = json.loads(file.read_text())
    file.write_text(json.dumps(known | {"chat_template": "{{ strftime_now('%d %b %Y') }}\n" + CHATML}))
    notes = Notes()
    build_artifact(changed(settings, model={"path": str(model)}), tmp_path / "art", progress=notes)
    assert any("2024-07-26" in line and "model.chat_date" in line for line in notes.lines)
    art = ArtifactReader.open(tmp_path / "art")
    assert art.manifest.settings["model"]["chat_date"] == "2024-07-26"

    class Tomorrow(chat_template_utils.datetime):
        @classmethod
        def now(cls, tz=None):
            return super().now(tz) + timedelta(days=1)

    monkeypatch.setattr(chat_template_utils, "datetime", Tomorrow)
    grasp.open(tmp_path / "art").select("50%").export(tmp_path / "kept")
    assert (tmp_path / "kept" / "_manifest.yaml").exists()
    assert BuildSource(art).tokenizer.render(Conversation(tuple(turns("a", "b")))).text.startswith("26 Jul 2024")
