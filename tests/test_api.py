"""The public interface: names, functions, and agreement with the command line."""

import ast
import contextlib
import io
import json
import pydoc
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import grasp
from tests.cli.grasp_command import assert_same_arrays, refused, succeed


def test_public_names_exist_and_a_wrong_one_raises():
    for name in dir(grasp):
        assert getattr(grasp, name) is not None
    with pytest.raises(AttributeError, match="'opne'"):
        grasp.opne  # noqa: B018
    namespace: dict[str, object] = {}
    exec("from grasp import *", namespace)
    assert "open" not in namespace  # the built-in is not shadowed
    assert namespace["build"] is grasp.build


def test_help_describes_each_name():
    text = pydoc.plain(pydoc.render_doc(grasp))
    assert grasp.__version__ in text
    assert all(name in text for name in dir(grasp) if not name.startswith("_"))
    assert all(getattr(grasp.Artifact, name).__doc__ for name in dir(grasp.Artifact) if not name.startswith("_"))


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


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda art: grasp.open(art / "none"), "no such artifact"),
        (lambda art: grasp.open(art).report("r.html", target=["facts", "facts"]), "target: .*facts more than once"),
        (lambda art: grasp.open(art).report(art / "manifest.json"), "choose another name"),
        (lambda art: grasp.open(art).score("sums"), r"target: .*'sums'.*'facts'"),
    ],
)
def test_missing_artifacts_and_invalid_arguments_are_refused(art, ask, message):
    with pytest.raises(grasp.GraspError, match=message):
        ask(art)


def test_the_report_of_the_command_equals_that_of_the_function(art, tmp_path):
    pytest.importorskip("jinja2")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        page = grasp.open(art).report(tmp_path / "r.html", by=["topic"])
    assert printed.getvalue() == ""
    line = succeed("report", art, "--by", "topic", "--out", tmp_path / "c.html").lines[0]
    assert line.startswith(f"{tmp_path / 'c.html'}: ")
    theirs, ours = (tmp_path / "c.html").read_text(), page.read_text()
    command = f"grasp report {art} --by topic --out {tmp_path}"
    assert command in theirs
    assert command in ours
    assert theirs.replace("c.html", "r.html") == ours
    assert "unknown column 'nothing'" in refused("report", art, "--by", "nothing", "--out", tmp_path / "d.html")


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


def test_the_only_target_needs_no_name(art):
    opened = grasp.open(art)
    assert list(opened.targets) == ["facts"]
    assert opened.score(top=3).to_arrow() == opened.score("facts", top=3).to_arrow()
    assert opened.select("30%", by="topic", cap="60%").row_ids == opened.select("30%", by="topic", cap=["60%"]).row_ids


def test_class_names_are_unique():
    names: Counter[str] = Counter()
    for path in Path(grasp.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names.update(n.name for n in tree.body if isinstance(n, ast.ClassDef) and not n.name.startswith("_"))
    assert not [name for name, count in names.items() if count > 1]


def test_runs_are_imported_only_if_needed():
    code = "import sys, grasp.api.predict, grasp.select.select, grasp.select.mix; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {name for name in loaded if name.split(".")[:2] == ["grasp", "runs"] or name == "torch"}
