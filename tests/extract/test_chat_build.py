"""A corpus of conversations from build to export: only the assistant's tokens count, whoever runs the model."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from grasp import api
from grasp.artifact.reader import ArtifactReader
from grasp.corpus.store import RowStore
from grasp.extract.extend import add_target
from grasp.extract.local import build_artifact
from grasp.extract.merge import merge
from grasp.extract.pictures import load_reference
from grasp.extract.reopen import BuildSource
from grasp.settings import BuildSettings, TargetSettings, build_settings
from tests.cli.grasp_command import arrays
from tests.corpus.chats import CHATML, turns
from tests.extract.test_local import Notes
from tests.extract.world import WORDS, world, write_targets


def conversations(n: int) -> list[dict]:
    rng = np.random.default_rng(3)
    lines = [
        [" ".join(rng.choice(WORDS, size=int(rng.integers(2, 6)))) for _ in range(2 + 2 * (i % 2))] for i in range(n)
    ]
    return [{"id": f"c{i}", "messages": turns(*words), "topic": "ab"[i % 2], "n": [i]} for i, words in enumerate(lines)]


def chat_settings(root: Path) -> BuildSettings:
    """A small world in `root` whose rows are conversations."""
    settings = world(root, features={"moment_positions": 10_000})
    template = json.loads((root / "model" / "tokenizer_config.json").read_text())
    (root / "model" / "tokenizer_config.json").write_text(json.dumps(template | {"chat_template": CHATML}))
    (root / "corpus.jsonl").write_text("".join(json.dumps(record) + "\n" for record in conversations(20)))
    return build_settings(settings.model_dump() | {"corpus": {"path": str(root / "corpus.jsonl"), "max_length": 120}})


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    root, notes = tmp_path_factory.mktemp("chat"), Notes()
    settings = chat_settings(root)
    build_artifact(settings, root / "art", progress=notes)
    asked = "asked as plain text, without the chat template that this model has"  # its questions are no conversations
    assert [line for line in notes.lines if asked in line]
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
    assert int(art.moments["token.count"][0]) == store.supervised().sum()


def test_a_conversation_is_short_by_the_tokens_that_carry_loss(chat):
    art = api.open(chat[0] / "art")
    supervised_N = RowStore.open(chat[0] / "art" / "tokens").supervised()
    rows = art.rows.to_pandas()
    assert rows["n_loss"].tolist() == supervised_N.tolist()
    assert "n_loss" not in art.labels
    median = int(np.median(supervised_N))
    assert median < rows["n_tokens"].min()  # which would pass over nothing
    found = art.score(next(iter(art.targets)), min_tokens=median).to_pandas()
    assert set(found["row_id"]) == set(rows["row_id"][supervised_N >= median])


def test_a_part_of_plain_text_joins_one_of_conversations(chat, tmp_path):
    root, settings = chat
    lines = [json.dumps({"id": f"t{i}", "text": " ".join(WORDS[i : i + 6])}) + "\n" for i in range(5)]
    (tmp_path / "text.jsonl").write_text("".join(lines))
    corpus = settings.corpus.model_copy(update={"path": str(tmp_path / "text.jsonl")})
    text = settings.model_copy(update={"corpus": corpus, "like": str(root / "art")})
    build_artifact(text, tmp_path / "text")
    both = api.open(merge([root / "art", tmp_path / "text"], tmp_path / "both").path)
    supervised = [RowStore.open(part / "tokens").supervised() for part in (root / "art", tmp_path / "text")]
    assert both.rows.to_pandas()["n_loss"].tolist() == np.concatenate(supervised).tolist()
    assert len(both.score(next(iter(both.targets)), min_tokens=1).to_pandas()) == len(np.concatenate(supervised))


def test_an_added_target_has_the_relevance_of_a_joint_build(chat, tmp_path):
    root, settings = chat
    names = (*settings.targets.names, str(write_targets(root / "more.jsonl", "more", 4, seed=5)))
    build_artifact(
        settings.model_copy(update={"targets": settings.targets.model_copy(update={"names": names})}),
        tmp_path / "joint",
    )
    build_artifact(settings, tmp_path / "art")
    assert add_target(tmp_path / "art", TargetSettings(names=names[1:], max_length=64)) == "pass"
    found, expected = arrays(tmp_path / "art"), arrays(tmp_path / "joint")
    np.testing.assert_allclose(found["relevance_token"], expected["relevance_token"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_an_export_holds_the_users_own_records(chat, tmp_path, kind):
    root, _ = chat
    art = api.open(root / "art")
    picked = art.select("50%")
    picked.export(tmp_path / "out", format=kind)
    files = sorted((tmp_path / "out").glob("part-*"))
    if kind == "jsonl":
        found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    else:
        found = [record for file in files for record in pq.read_table(file).to_pylist()]
    names = set(picked.table["row_id"].to_pylist())
    assert found == [record for record in conversations(20) if record["id"] in names]
