"""The public interface: names, functions, and agreement with the command line."""

import ast
import json
import shutil
from collections import Counter
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import grasp
from tests.cli.grasp_command import assert_same_arrays, succeed


def test_public_names_exist_and_a_wrong_one_raises():
    for name in dir(grasp):
        assert getattr(grasp, name) is not None
    with pytest.raises(AttributeError, match="'opne'"):
        grasp.opne  # noqa: B018
    namespace: dict[str, object] = {}
    exec("from grasp import *", namespace)
    assert "open" not in namespace  # the built-in is not shadowed
    assert namespace["build"] is grasp.build


def test_an_artifact_displays_its_contents(art):
    artifact = grasp.open(art)
    table = pq.read_table(art / "rows.parquet")
    assert len(artifact) == table.num_rows
    assert artifact.targets == {"facts": 6}
    assert "topic" in artifact.labels
    assert artifact.rows.to_arrow() == table.drop_columns(["row_index"])
    assert list(artifact.rows.to_pandas()["row_id"]) == table["row_id"].to_pylist()
    assert repr(artifact).startswith(f"GRASP artifact {art}: {len(artifact):,} rows, ")
    assert repr(artifact).splitlines()[1:] == ["target  units", "facts       6"]
    assert '>facts</td><td style="text-align:right">6</td>' in artifact._repr_html_()
    assert artifact.info().n_rows == len(artifact)
    assert artifact.verify().ok


def test_an_artifact_of_objects_in_memory_equals_that_of_files(root, art, tmp_path):
    settings = yaml.safe_load((root / "settings.yaml").read_text())
    for group, name in (("model", "path"), ("corpus", "path"), ("targets", "names")):
        del settings[group][name]
    model = AutoModelForCausalLM.from_pretrained(root / "model")
    tokenizer = AutoTokenizer.from_pretrained(root / "model")
    corpus = pd.read_json(root / "corpus.jsonl", lines=True)
    units = [json.loads(line) for line in (root / "facts.jsonl").read_text().splitlines()]
    was_training = model.training
    built = grasp.build(model, corpus, units, tmp_path / "art", tokenizer=tokenizer, settings=settings, untrained=True)
    assert isinstance(built, grasp.Artifact)
    assert model.training is was_training
    assert built.targets == grasp.open(art).targets
    assert_same_arrays(tmp_path / "art", art)
    assert built.rows.to_arrow() == grasp.open(art).rows.to_arrow()
    reopened = grasp.build(
        model, corpus, units, tmp_path / "art", tokenizer=tokenizer, settings=settings, untrained=True
    )
    assert reopened.path == built.path


# ------------------------------------------------------------------------------------------- the journey


@pytest.mark.parametrize(
    ("ask", "verb", "flags"),
    [
        (lambda opened: opened.score("facts", top=3, bottom=2), "score", ("--top", 3, "--bottom", 2)),
        (lambda opened: opened.mix("topic", "facts"), "mix", ("--by", "topic")),
        (lambda opened: opened.select("20%", "facts", by="topic"), "select", ("--budget", "20%", "--by", "topic")),
    ],
)
def test_a_function_returns_the_table_that_its_command_writes(art, tmp_path, ask, verb, flags):
    result = ask(grasp.open(art))
    succeed(verb, art, "--target", "facts", *flags, "--out", tmp_path / "out.parquet")
    assert result.to_arrow().to_pylist() == pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert "row_index" not in result.to_arrow().column_names


def test_an_opened_artifact_caches_relevance(art, tmp_path):
    copy = tmp_path / "art"
    shutil.copytree(art, copy)
    opened = grasp.open(copy)
    question = {"drop": "topic = 'sky'"}
    first = opened.predict(**question)
    for kernel in ("pooled", "output_layer", "embedding"):
        shutil.rmtree(copy / "arrays" / f"relevance_{kernel}", ignore_errors=True)
    assert opened.predict(**question).table.equals(first.table)
    with pytest.raises(grasp.GraspError, match="relevance_"):
        grasp.open(copy).predict(**question)


def test_class_names_are_unique():
    names: Counter[str] = Counter()
    for path in Path(grasp.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names.update(n.name for n in tree.body if isinstance(n, ast.ClassDef) and not n.name.startswith("_"))
    assert not [name for name, count in names.items() if count > 1]
