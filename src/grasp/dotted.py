"""Leaves of nested mappings by dotted path, e.g. `model.classifier.factory`."""

from collections.abc import Mapping, Sequence
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


def put_all(data: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Set leaves by their dotted paths; None says nothing."""
    for name, value in values.items():
        if value is not None:
            put(data, name, value)
    return data


def require(data: Mapping[str, Any], flags: Mapping[str, Sequence[str]], where: str) -> None:
    """See that nothing is left out; `flags` maps a flag to the leaves of which one must have a value.

    Raises:
        SettingsError: every flag that is missing, with the setting that it stands for.
    """
    missing = [f"{flag} ({paths[0]})" for flag, paths in flags.items() if not any(leaf(data, path) for path in paths)]
    if missing:
        raise SettingsError(
            f"{where}: missing {', '.join(missing)}; give it as an argument, or in the settings (--set, --config)"
        )


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
