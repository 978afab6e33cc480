"""Targets from `datasets` directories: format strings over columns."""

import pytest

from grasp.errors import MissingExtraError, TargetError
from grasp.settings import DatasetTarget, TargetSettings
from grasp.targets import load_units

datasets = pytest.importorskip("datasets")

TABLE = {"key": ["a", "b"], "question": ["Who?", "Where?"], "answer": ["me", "here"], "spans": [["x"], ["y"]]}


def load(path, **changes):
    plain = {"name": "qa", "path": str(path), "prompt": "Q: {question}\nA:", "completion": " {answer}"}
    return load_units(TargetSettings(datasets=(DatasetTarget(**plain | changes),))).units


@pytest.fixture(autouse=True)
def _private_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def table(tmp_path):
    datasets.Dataset.from_dict(TABLE).save_to_disk(tmp_path / "table")
    return tmp_path / "table"


@pytest.fixture
def splits(tmp_path):
    table = datasets.Dataset.from_dict(TABLE)
    datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk(tmp_path / "splits")
    return tmp_path / "splits"


def test_columns_fill_the_format_strings(table):
    units = {unit.unit_id: (unit.prompt, unit.completion) for unit in load(table)}
    assert units == {"qa:0": ("Q: Who?\nA:", " me"), "qa:1": ("Q: Where?\nA:", " here")}


def test_ids_come_from_a_column_and_fields_may_look_inside(table):
    units = {unit.unit_id: unit.completion for unit in load(table, unit_id="key", completion="{spans[0]}")}
    assert units == {"qa:a": "x", "qa:b": "y"}


def test_a_split_is_chosen_by_name(splits):
    assert [unit.completion for unit in load(splits, split="test")] == [" here"]
    for split, said in ((None, "has the splits test, train"), ("dev", "qa.split: got 'dev', .* has test, train")):
        with pytest.raises(TargetError, match=said):
            load(splits, split=split)


def test_data_files_on_disk_are_read_as_well(tmp_path):
    datasets.Dataset.from_dict(TABLE).to_parquet(tmp_path / "data" / "train.parquet")
    assert len(load(tmp_path / "data")) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": "{nope}"}, "qa: no column nope; .* has key, question, answer, spans"),
        ({"unit_id": "uid"}, "no column uid"),
        ({"prompt": "{}"}, r"qa.prompt: '\{\}' has a field without a name"),
        ({"prompt": "{question"}, "qa.prompt: .* is no format string"),
        ({"completion": "{spans[3]}"}, "row 0: does not fit targets.datasets.qa.completion: IndexError"),
        ({"completion": ""}, "row 0: completion: got '', expected text"),
        ({"split": "test"}, r"qa.split: got 'test', but .* is one table"),
    ],
)
def test_mappings_that_do_not_fit_are_refused(table, changes, message):
    with pytest.raises(TargetError, match=message):
        load(table, **changes)


def test_a_path_with_nothing_to_read_is_named(tmp_path):
    datasets.Dataset.from_dict({"question": [], "answer": []}).save_to_disk(tmp_path / "none")
    (tmp_path / "bare").mkdir()
    for name, said in (("none", ".*none"), ("bare", ".*no Parquet or JSONL file")):
        with pytest.raises(TargetError, match=f"targets.datasets.qa: {said}"):
            load(tmp_path / name)


def test_a_missing_package_names_the_extra(table, monkeypatch):
    def absent(module):
        raise ImportError(module)

    monkeypatch.setattr("importlib.import_module", absent)
    with pytest.raises(MissingExtraError, match=r"pip install 'grasp-attribution\[datasets\]'"):
        load(table)
