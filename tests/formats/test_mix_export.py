"""What `mix` proposes, in the files of training tools: shares by what each tool weighs."""

from pathlib import Path

import numpy as np
import pytest
import yaml

import grasp
from grasp.corpus.documents import read_documents
from grasp.file_readers import readers
from grasp.mixtures import read_mixture
from grasp.settings import CorpusSettings
from tests.cli.grasp_command import succeed
from tests.runs.environments import TOPICS, write_artifact

FORMATS = readers("mixture")


@pytest.mark.parametrize("form", list(FORMATS))
def test_mix_writes_shares_of_what_the_tool_weighs(tmp_path, form):
    artifact = write_artifact(tmp_path / "art")
    place = tmp_path / f"mixture{FORMATS[form].suffixes[0]}"
    output = succeed("mix", artifact.path, "--by", "topic", "--target", "sciq", "--format", form, "--out", place).out
    assert f"{place}: {form}, " in output
    assert [path.name for path in tmp_path.glob("mixture*")] == [place.name]
    art = grasp.Artifact(artifact)
    want = art.mix(by="topic", target="sciq").to_pandas().set_index("value")["times_as_often"]
    by_topic = art.rows.to_pandas().groupby("topic")
    read_back = read_mixture(place)
    if read_back.measure != "times":
        size = by_topic["n_tokens"].sum() if read_back.measure == "tokens" else by_topic["doc_id"].nunique()
        want = want * size / (want * size).sum()
    for topic in TOPICS:
        np.testing.assert_allclose(read_back.weight_of[topic], want[topic], atol=0.005 if form == "axolotl" else 1e-6)


def test_entries_for_axolotl_are_read_with_their_splits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_artifact(tmp_path / "art").path
    succeed("mix", path, "--by", "topic", "--target", "sciq", "--format", "axolotl", "--out", "mixture.yaml")
    (tmp_path / "data").mkdir()
    for topic in TOPICS:
        (tmp_path / "data" / f"{topic}.jsonl").write_text("".join(f'{{"text": "{k}"}}\n' for k in range(100)))
    entries = yaml.safe_load((tmp_path / "mixture.yaml").read_text())["datasets"]
    assert {entry["split"] == "train" for entry in entries} == {True, False}
    n_documents = dict.fromkeys(TOPICS, 0)
    for k, entry in enumerate(entries):
        is_repeated = entry["path"] in [other["path"] for other in entries[:k]]
        corpus = CorpusSettings(path=f"mixture.yaml#{entry['path']}{f':{k}' if is_repeated else ''}")
        n_documents[Path(entry["path"]).stem] += len(list(read_documents(corpus)))
    assert n_documents == {topic: 100 * n for topic, n in read_mixture(tmp_path / "mixture.yaml").weight_of.items()}
