"""Methods by name and by configuration: selection, validation and one-line errors."""

import re

import pytest

from grasp.errors import SettingsError
from grasp.methods.registry import configure_methods, load_method
from tests.baselines.world import METHODS, configured_method


def test_a_file_configures_methods_and_gives_them_labels():
    file = {
        "bm25": {"k1": 0.9},
        "short": {"method": "bm25", "k1": 0.8, "seed": 3, "oracle_selected": True, "weighting": "count"},
        "taught": {"method": "random", "negative": 0.25},
    }
    first, second, third = configure_methods(None, file)
    assert first.method.settings.k1 == 0.9
    assert (second.method.name, second.method.settings.k1, second.method.seed) == ("bm25", 0.8, 3)
    assert (second.oracle_selected, second.weighting, second.negative_scale) == (True, "count", 1.0)
    assert third.negative_scale == 0.25
    (only,) = configure_methods(["short"], file)
    assert only.label == "short"


@pytest.mark.parametrize("name", list(METHODS))
def test_every_entry_point_loads_and_has_a_description(name):
    method_class = load_method(name)
    headings = re.findall(r"^ +(Source|As published|Deviation):", method_class.__doc__, re.MULTILINE)
    assert headings == ["Source", "As published", "Deviation"] or name in ("random", "length")
    fields = method_class.settings_type.model_fields
    assert all(field.description for field in fields.values())
    assert method_class.settings_type.model_config["frozen"]
    assert not {"method", "seed", "oracle_selected", "weighting", "negative"} & set(fields)


@pytest.mark.parametrize(
    ("names", "file", "message"),
    [
        (["bm52"], {}, r"unknown method 'bm52'; did you mean bm25\?"),
        (["nonsense"], {}, r"unknown method 'nonsense'; available: bm25, "),
        (["lexical"], {"mine": {"method": "bm25"}}, r"unknown label 'lexical'; configured in file: mine"),
        (["bm25", "bm25"], {}, r"bm25 given twice"),
        (None, {"mine": {"k1": 1.0}}, r"mine is not a method"),
        (None, {"mine": {"method": "bm52"}}, r"did you mean bm25\?"),
        (None, {"mine": {"method": 3}}, r"mine: method: got 3"),
        (None, {"bm25": 3}, r"bm25: got 3, expected settings by name"),
        (None, {"bm25": {"seed": "one"}}, r"seed: .*, got 'one'"),
        (None, {"datamodels": {"negative": 0.5}}, r"negative: not supported by datamodels"),
        (None, {"bm25": {"weighting": "meen", "sed": 1, "k1": -1}}, r"weighting: .*'meen'; k1: .* -1; sed: no such fi"),
    ],
)
def test_invalid_input_is_reported(names, file, message):
    with pytest.raises(SettingsError, match=message):
        configure_methods(names, file, "file")


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("less", {"adm": "never"}, "adm: no such field, got 'never' .did you mean adam"),
        ("less", {"adam": "never", "betas": (0.9, 0.99)}, "betas: no effect"),
        ("inrun", {"order": 3}, r"order: .*1 or 2, got 3"),
        ("inrun", {"learning_rate": float("nan")}, "learning_rate: "),
        ("inrun", {"layers": []}, "layers: "),
        ("knn_shapley", {"k": 10, "nearest": 10}, "nearest: got 10, expected more than k, 10"),
    ],
)
def test_incompatible_settings_are_refused(name, settings, message):
    with pytest.raises(SettingsError, match=message):
        configured_method(name, **settings)
