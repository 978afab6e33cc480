"""docs/baselines.md describes every method and setting, and the settings of the experiment are valid."""

import re
from pathlib import Path

import pytest
import yaml

from grasp.methods.registry import configure_methods, load_method
from tests.baselines.world import METHODS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "baselines.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", TEXT, flags=re.MULTILINE | re.DOTALL))


def test_every_method_has_a_section_and_every_section_is_a_method():
    assert set(METHODS) <= set(SECTIONS)
    assert [name for name in SECTIONS if name.islower() and name not in METHODS] == []


@pytest.mark.parametrize("name", list(METHODS))
def test_every_setting_and_the_floats_per_row_are_documented(name):
    section = SECTIONS[name]
    fields = load_method(name).settings_type.model_fields
    assert [field for field in fields if not re.search(rf"`[^`]*\b{field}\b[^`]*`", section)] == []
    assert "loats a row" in " ".join(section.split()) or name == "datamodels"


@pytest.mark.parametrize(
    "file", sorted((ROOT / "experiments" / "baselines").glob("*.yaml")), ids=lambda path: path.name
)
def test_settings_of_the_experiment_are_valid(file):
    configured = yaml.safe_load(file.read_text(encoding="utf-8"))
    configured_list = configure_methods(None, configured, file.name)
    assert [entry.label for entry in configured_list] == list(configured)


def test_the_experiment_has_every_method():
    configured = yaml.safe_load((ROOT / "experiments" / "baselines" / "methods.yaml").read_text(encoding="utf-8"))
    used = {entry.method.name for entry in configure_methods(None, configured)}
    assert set(METHODS) == used
