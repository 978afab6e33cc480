"""Methods by name and by configuration: what is asked for is what runs, and mistakes are told in one line."""

import re

import pytest

from grasp.errors import SettingsError
from grasp.methods.registry import configured_methods, method_named
from tests.baselines.world import METHODS, asked


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
        (["bm52"], {}, r"got 'bm52'; did you mean bm25\?"),
        (["nonsense"], {}, r"got 'nonsense'; there are activation_similarity, "),
        (["lexical"], {"mine": {"method": "bm25"}}, r"got 'lexical'; file has mine"),
        (["bm25", "bm25"], {}, r"got bm25 twice"),
        (None, {"mine": {"k1": 1.0}}, r"mine is no method"),
        (None, {"mine": {"method": "bm52"}}, r"did you mean bm25\?"),
        (None, {"mine": {"method": 3}}, r"mine: method: got 3"),
        (None, {"bm25": 3}, r"bm25: got 3, expected settings by name"),
        (None, {"bm25": {"seed": "one"}}, r"seed: .*, got 'one'"),
        (None, {"datamodels": {"negative": 0.5}}, r"negative: datamodels predicts subsets and scores no"),
        (None, {"bm25": {"weighting": "meen", "sed": 1, "k1": -1}}, r"weighting: .*'meen'; k1: .* -1; sed: no such fi"),
    ],
)
def test_mistakes_are_told(names, file, said):
    with pytest.raises(SettingsError, match=said):
        configured_methods(names, file, "file")


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("less", {"adm": "never"}, "adm: no such field, got 'never' .did you mean adam"),
        ("influence", {"curvature": "none", "damping": 0.1, "labels": "true"}, "damping, labels: no effect"),
        ("tracin", {"dimension": None, "projection": "dense"}, "projection: no effect"),
        ("datainf", {"projection": "dense"}, "projection: no effect"),
        ("less", {"adam": "never", "betas": (0.9, 0.99)}, "betas: no effect"),
        ("inrun", {"order": 3}, r"order: .*1 or 2, got 3"),
        ("inrun", {"learning_rate": float("nan")}, "learning_rate: "),
        ("inrun", {"utility": "unit", "validation_units": 3}, "validation_units: .*every unit"),
        ("inrun", {"layers": []}, "layers: "),
        ("knn_shapley", {"k": 10, "nearest": 10}, "nearest: got 10, expected more than k, 10"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(name, settings, said):
    with pytest.raises(SettingsError, match=said):
        asked(name, **settings)
