"""Leaves of nested mappings by dotted path, e.g. `model.classifier.factory`."""

from collections.abc import Mapping
from typing import Any

from grasp.errors import SettingsError


def leaf(data: Any, name: str) -> Any:
    """What stands at a dotted path; None where there is nothing."""
    for step in name.split("."):
        data = data.get(step) if isinstance(data, Mapping) else None
    return data


def put(data: dict[str, Any], name: str, value: Any) -> None:
    """Set a leaf by its dotted path."""
    *steps, last = name.split(".")
    for step in steps:
        data = data.setdefault(step, {})
        if not isinstance(data, dict):
            raise SettingsError(f"{name}: `{step}` holds a value, expected a group of settings")
    data[last] = value


def take(data: dict[str, Any], name: str) -> Any:
    """Remove a leaf, and the groups that it leaves empty; None where there is nothing."""
    step, _, rest = name.partition(".")
    if not rest:
        return data.pop(step, None)
    group = data.get(step)
    if not isinstance(group, dict):
        return None
    value = take(group, rest)
    if not group:
        del data[step]
    return value


def over(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings, one over the other."""
    for name, value in above.items():
        inner = below.get(name)
        below[name] = over(inner, value) if isinstance(inner, dict) and isinstance(value, Mapping) else value
    return below
