"""A reader of another package is asked before those of GRASP, and converts what it claims."""

import sys

import pyarrow as pa
import pytest

import grasp
from grasp.corpus.documents import read_documents
from grasp.errors import MissingExtraError
from grasp.file_readers import claimed, readers
from grasp.settings import CorpusSettings, TargetSettings
from grasp.targets import load_units
from grasp.targets.unit_records import units_from_records
from grasp.targets.units import Unit
from grasp.training.fine_tuning_recipe import FineTuningRecipe

SOURCE = """
from pathlib import Path

from grasp.targets.units import Unit

class Reader:
    ALIASES, LOG_NAME = {}, __import__("re").compile("quiz-(?P<task>.+)")

    def __init__(self, claims, read):
        self.claims, self.read = claims, read

corpus = Reader(lambda path: "its suffix" * path.endswith(".list"), lambda path: {"path": Path(path).read_text()})
target = Reader(
    lambda record: "it has `riddle`" * ("riddle" in record),
    lambda records, task, loss_on: [Unit(f"{task}:0", task, r["riddle"], r["word"], loss_on) for _, r in records],
)
task = Reader(
    lambda name: "its name" * (name == "riddles"),
    lambda name, variant, loss_on: [Unit("riddles:0", name, "p", "c", loss_on)],
)
recipe = Reader(
    lambda fields: "it has `pace`" * ("pace" in fields), lambda fields: {"learning_rate": fields["pace"]}
)
run_table = Reader(
    lambda table: "a column" * ("who" in table.column_names),
    lambda table: table.rename_columns(["run", "a", "b", "loss"]),
)
"""


@pytest.fixture
def package(install):
    doors = ("corpus", "target", "task", "recipe", "run_table")
    points = "".join(f"{door}.quiz = quiz_package:{door}\n" for door in doors)
    return install("quiz_package", SOURCE, f"[grasp.readers]\n{points}", "quiz")


@pytest.mark.usefixtures("package")
def test_a_reader_of_another_package_is_asked_first(tmp_path):
    assert next(iter(readers("recipe"))) == "quiz"
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "a.list").write_text(str(tmp_path / "a.jsonl"))
    (document,) = read_documents(CorpusSettings(path=str(tmp_path / "a.list")))
    assert document.text == "one"
    (tmp_path / "quiz-hard.jsonl").write_text('{"riddle": "what?", "word": "this"}\n')
    expected = Unit("hard:0", "hard", "what?", "this", "completion")
    assert load_units(TargetSettings(names=(str(tmp_path / "quiz-hard.jsonl"), "riddles"))).units[0] == expected
    assert FineTuningRecipe.from_mapping({"pace": 0.25}) == FineTuningRecipe(learning_rate=0.25)
    table = pa.table({"who": ["x", "y"], "a": [0.5, 0.2], "b": [0.5, 0.8], "loss": [1.0, 2.0]})
    assert grasp.import_runs(table, label="topic", metrics=["loss"]).runs == ("x", "y")


def test_what_no_reader_claims_is_in_a_form_of_grasp(tmp_path):
    assert claimed("corpus", str(tmp_path)) is None
    assert claimed("target", {"question": "q", "answer": "a"}) is None
    (unit,) = units_from_records([("1", {"question": "q", "answer": "a"})], "t", "completion")
    assert (unit.prompt, unit.completion) == ("Question: q\nAnswer:", " a")


def test_a_broken_reader_is_named(package, monkeypatch):
    monkeypatch.delitem(sys.modules, "quiz_package", raising=False)
    (package / "quiz_package.py").write_text("corpus = None\n")
    with pytest.raises(MissingExtraError, match=r"reader target\.quiz: quiz_package:target of package quiz cannot"):
        readers("target")
