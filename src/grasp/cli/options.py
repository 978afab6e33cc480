"""From flags, --set and a settings file to settings. Flags win over --set, --set over the file."""

from pathlib import Path
from typing import Any

import yaml

from grasp.errors import SettingsError
from grasp.settings import read_yaml


def merged(config: Path | None, assignments: list[str], flags: dict[str, Any]) -> dict[str, Any]:
    """One nested mapping; `flags` and `assignments` name leaves by dotted path, and None flags say nothing.

    Raises:
        SettingsError: the file is not a mapping, or an assignment is not `name=value`.
    """
    data = read_yaml(config) if config is not None else {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name:
            raise SettingsError(f"--set: got `{assignment}`, expected name=value, e.g. features.tau=0.02")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as err:
            raise SettingsError(f"--set {name}: got `{text}`, which is not a YAML value") from err
        put(data, name, value)
    for name, value in flags.items():
        if value is not None:
            put(data, name, value)
    return data


def put(data: dict[str, Any], name: str, value: Any) -> None:
    """Set a leaf by its dotted path."""
    *steps, leaf = name.split(".")
    for step in steps:
        data = data.setdefault(step, {})
        if not isinstance(data, dict):
            raise SettingsError(f"{name}: `{step}` holds a value, expected a group of settings")
    data[leaf] = value


def names(text: str | None) -> list[str] | None:
    """A comma-separated list."""
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]
