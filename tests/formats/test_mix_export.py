"""What `mix` proposes, in the files of training tools: shares by what each tool weighs."""

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import yaml

import grasp
from grasp.corpus.documents import read_documents
from grasp.file_readers import readers
from grasp.mixtures import read_mixture
from grasp.runs.imported_runs import row_weights
from grasp.select.mix import mix
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


@pytest.mark.parametrize("form", list(FORMATS))
def test_a_mixture_is_the_same_after_it_is_imported_and_written_again(tmp_path, form):
    artifact = write_artifact(tmp_path / "art")
    (tmp_path / "mixtures").mkdir()
    names = {cap: f"cap-{cap[:-1]}{FORMATS[form].suffixes[0]}" for cap in ("100%", "40%")}
    mixtures = {}
    for cap, name in names.items():
        mixtures[name] = mix(artifact, by="topic", target="sciq", cap=[cap])
        mixtures[name].export(tmp_path / "mixtures" / name, form)
    results = pa.table({"run": ["cap-100", "cap-40"], "sciq/loss": [3.0, 3.1]})
    runs = grasp.import_runs(tmp_path / "mixtures", results, label="topic")
    (block,), _ = row_weights(runs, artifact)
    for name, mixture in mixtures.items():
        weight_N = block.weights_BN[[runs.runs.index(name.split(".")[0])]].toarray()[0]
        times_G = [weight_N[mixture.slices.codes_N == g].mean() for g in range(len(TOPICS))]
        expected_G = mixture.table["times_as_often"].to_numpy()  # in as many rows, not as many tokens, as the corpus
        expected_G = expected_G * (np.sum(times_G) / np.sum(expected_G) if runs.info.kind == "shares" else 1.0)
        np.testing.assert_allclose(times_G, expected_G, atol=0.005 if form == "axolotl" else 1e-6)
        table = mixture.table.set_column(5, "times_as_often", pa.array(times_G))
        dataclasses.replace(mixture, table=table).export(tmp_path / name, form)
        assert read_mixture(tmp_path / name) == read_mixture(tmp_path / "mixtures" / name)
