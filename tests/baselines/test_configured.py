"""Methods by name and by configuration: what is asked for is what runs, and mistakes are told in one line."""

import re
import sys

import pytest

from grasp.errors import MissingExtraError, SettingsError
from grasp.methods.registry import configured_methods, method_named
from tests.baselines.world import METHODS


def test_a_name_is_the_method_with_its_defaults():
    one, two = configured_methods(["bm25", "loss"])
    assert (one.label, one.method.name, one.method.settings.k1, one.oracle_selected) == ("bm25", "bm25", 1.2, False)
    assert two.label == "loss"
    assert configured_methods(["grasp"]) == ()


def test_a_file_configures_methods_and_gives_them_labels():
    file = {
        "bm25": {"k1": 0.9},
        "short": {"method": "bm25", "query": "completion", "seed": 3, "oracle_selected": True, "weighting": "count"},
        "taught": {"method": "random", "negative": 0.25},
    }
    one, two, three = configured_methods(None, file)
    assert one.method.settings.k1 == 0.9
    assert (two.method.name, two.method.settings.query, two.method.seed) == ("bm25", "completion", 3)
    assert (two.oracle_selected, two.weighting, two.negative) == (True, "count", 1.0)
    assert three.negative == 0.25
    (only,) = configured_methods(["short"], file)
    assert only.label == "short"


@pytest.mark.parametrize("name", list(METHODS))
def test_every_entry_loads_and_says_what_it_is(name):
    kind = method_named(name).load()
    assert kind.__doc__
    assert re.search(r"Source: |\b20\d\d\b", kind.__doc__) or name in ("random", "length", "loss")
    assert all(field.description for field in kind.settings_type.model_fields.values())
    assert kind.settings_type.model_config["frozen"]
    assert not {"method", "seed", "oracle_selected", "weighting", "negative"} & set(kind.settings_type.model_fields)


@pytest.mark.parametrize(
    ("names", "file", "said"),
    [
        (["bm52"], {}, r"got 'bm52'; did you mean bm25\? there are activation_similarity, "),
        (["nonsense"], {}, r"got 'nonsense'; there are activation_similarity, "),
        (
            ["lexical"],
            {"mine": {"method": "bm25"}},
            r"methods: got 'lexical'; file has mine, and there are activ",
        ),
        (None, {"mine": {"k1": 1.0}}, r"file: mine is no method; name its method: mine: \{method: \.\.\., \.\.\.\}"),
        (None, {"mine": {"method": "bm52"}}, r"method: got 'bm52'; did you mean bm25\?"),
        (
            None,
            {"bm25": {"kk": 1.0}},
            r"file: bm25: kk: no such field, got 1.0 \(there are: k1, b, top, ",
        ),
        (None, {"bm25": {"k1": -1}}, r"file: bm25: k1: Input should be greater than or equal to 0, got -1"),
        (None, {"bm25": 3}, r"file: bm25: got 3, expected settings by name, or \{\}"),
        (None, {"bm25": {"seed": -1}}, r"file: bm25: seed: .*, got -1"),
        (None, {"bm25": {"seed": "one"}}, r"file: bm25: seed: .*, got 'one'"),
        (None, {"bm25": {"oracle_selected": "maybe"}}, r"file: bm25: oracle_selected: .*, got 'maybe'"),
        (["loss"], {"bm25": {"weighting": "sum"}}, r"file: bm25: weighting: .*'count' or 'mean', got 'sum'"),
        (["loss"], {"bm25": {"negative": 1.5}}, r"file: bm25: negative: .*less than or equal to 1, got 1.5"),
        (
            None,
            {"datamodels": {"negative": 0.5}},
            r"file: datamodels: negative: datamodels predicts subsets and scores no",
        ),
        (
            None,
            {"datamodels": {"weighting": "count", "penalty": "ridge"}},
            r"file: datamodels: weighting: datamodels predicts subsets and scores no rows; leave out",
        ),
        (
            None,
            {"bm25": {"weighting": "meen", "sed": 1, "k1": -1}},
            r"file: bm25: weighting: .*'count' or 'mean', got 'meen'; k1: .* 0, got -1; sed: no such field, got 1 \(",
        ),
        (None, {"mine": {"method": 3}}, r"file: mine: method: got 3, expected one of activation_similarity, "),
        (["bm25", "bm25"], {}, r"methods: got bm25 twice; give one of them another label in a settings file"),
    ],
)
def test_mistakes_are_told(names, file, said):
    with pytest.raises(SettingsError, match=said):
        configured_methods(names, file, "file")


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(
        MissingExtraError,
        match=r"method bm25 needs `bm25s`, which is not installed: pip install 'grasp-attribution\[baselines\]'",
    ):
        configured_methods(["bm25"])
