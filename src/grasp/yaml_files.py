"""Read, validate and write YAML settings; all errors of a file are reported in one line.

No other module reads or writes YAML. Settings are nested dictionaries before they are validated. The name of a setting
is its dotted path in them, e.g. `model.classifier.factory`. Start with `validated` and `read_yaml`.
"""

import re
from collections.abc import Mapping
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from grasp.errors import GraspError, SettingsError
from grasp.files import write_atomically
from grasp.text import plain

MAX_FILE_BYTES = 4 << 20  # size of a YAML file
MAX_VALUE_CHARS = 200  # characters of an invalid field or value in a message
MAX_ERRORS_SHOWN = 20  # errors in a message

M = TypeVar("M", bound=BaseModel)


def validated(
    model_class: type[M], data: Mapping[str, Any], location: str, error_type: type[GraspError] = SettingsError
) -> M:
    """Validate nested settings against a pydantic model class.

    Args:
        model_class: class of the result.
        data: the settings.
        location: beginning of error messages, e.g. the name of a file.
        error_type: class of errors.
    Raises:
        GraspError: of class `error_type`; the message lists every invalid setting.
    """
    try:
        return model_class.model_validate(data)
    except ValidationError as err:
        raise error_type(describe(err, location, model_class)) from err


def describe(err: ValidationError, location: str, model_class: type[BaseModel] | None = None) -> str:
    """Format validation errors in one line; if `model_class` is given, with suggestions for misspelt fields.

    Args:
        err: error of pydantic.
        location: beginning of the message; empty: none.
        model_class: class that was validated.
    """
    messages = []
    for item in err.errors()[:MAX_ERRORS_SHOWN]:
        field = plain(".".join(str(step) for step in item["loc"]), MAX_VALUE_CHARS)
        got = (
            "" if item["type"] in ("missing", "value_error") else f", got {plain(repr(item['input']), MAX_VALUE_CHARS)}"
        )
        if item["type"] == "string_type" and isinstance(item["input"], dict):
            got += "; quote text that contains : or {}, --set 'NAME=\"...\"'"
        reason = _REASONS.get(item["type"], item["msg"].removeprefix("Value error, "))
        colon = "." if field and _OF_FIELD.match(reason) else ": "
        messages.append(f"{field}{colon}{reason}{got}{_suggest_field(model_class, item)}".removeprefix(": "))
    more = f"; {err.error_count() - MAX_ERRORS_SHOWN} more" if err.error_count() > MAX_ERRORS_SHOWN else ""
    return f"{location}: " * bool(location) + "; ".join(messages) + more


_OF_FIELD = re.compile(r"\w+(, \w+)*: ")  # a fault of one or several fields of a group, see `settings.refuse`
# Messages by pydantic's type of an error; others have pydantic's message.
_REASONS = {
    "missing": "missing",
    "extra_forbidden": "no such field",
    "model_type": "expected fields with names",
    "tuple_type": "expected a list",
    "string_pattern_mismatch": "invalid name",
    "string_too_long": "name too long",
}


def _suggest_field(model_class: type[BaseModel] | None, item: Mapping[str, Any]) -> str:
    """Return a similar field, or all fields, if the error is an unknown field; else an empty text."""
    if model_class is None or item["type"] != "extra_forbidden":
        return ""
    *groups, field = (str(step) for step in item["loc"])
    for group in groups:
        inner = model_class.model_fields[group].annotation if group in model_class.model_fields else None
        if not isinstance(inner, type) or not issubclass(inner, BaseModel):
            return ""
        model_class = inner
    close = get_close_matches(field, model_class.model_fields, n=1)
    return f" (did you mean {close[0]}?)" if close else f" (there are: {', '.join(model_class.model_fields)})"


class _Refused(yaml.YAMLError):
    """Valid YAML that is refused; the message has the line."""


class _Loader(yaml.SafeLoader):
    """Safe YAML without duplicate keys."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return the next mapping; refuse it if a key occurs twice, of which PyYAML would ignore the first."""
        node = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], int] = {}  # line of a key, by its type and text
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if (key.tag, key.value) in first:
                raise _Refused(
                    f"line {line}: duplicate key {key.value!r}, first in line {first[key.tag, key.value]}; remove one"
                )
            first[key.tag, key.value] = line
        return node


def parse_yaml(text: str, location: str) -> Any:
    """Parse a YAML value; error messages start with `location`."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as err:  # an invalid date, 5,000 digits, deep nesting
        reason = str(err) if isinstance(err, _Refused) else f"not YAML: {plain(err, MAX_VALUE_CHARS)}"
        raise SettingsError(f"{location}: {reason}") from err


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping; any other value and duplicate keys are refused."""
    try:
        with path.open("rb") as file:  # bounded, since /dev/zero never ends
            content = file.read(MAX_FILE_BYTES + 1).decode()
    except FileNotFoundError:
        fault = "no such settings file"
    except OSError as err:
        fault = f"cannot be read: {err.strerror}; expected a YAML file of settings"
    except UnicodeDecodeError as err:
        fault = f"not YAML: {err}"
    else:
        fault = f"more than {MAX_FILE_BYTES:,} bytes; expected a YAML file of settings"
        if len(content) <= MAX_FILE_BYTES:
            data = parse_yaml(content, str(path))
            if isinstance(data, dict):
                return data
            content_type = "an empty file" if data is None else type(data).__name__
            fault = f"got {content_type}, expected a mapping of settings, such as NAME: VALUE"
    raise SettingsError(f"{path}: {fault}")


def plain_settings(settings: Mapping[str, Any] | Path | str | None) -> dict[str, Any]:
    """Return nested settings as a new dictionary: a copy of a mapping, or the content of a YAML file."""
    if isinstance(settings, Mapping):
        return deepcopy(dict(settings))
    return read_yaml(Path(settings)) if settings else {}


def write_yaml(data: dict[str, Any], path: Path) -> None:
    """Write a mapping as a YAML file, atomically."""
    write_atomically(path, yaml_text(data).encode())


def yaml_text(data: Mapping[str, Any]) -> str:
    """Format a mapping as YAML, in its own order."""
    return yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True)


def get_setting(data: Any, name: str) -> Any:
    """Return the setting with a dotted name, or None if it is not set."""
    for step in name.split("."):
        data = data.get(step) if isinstance(data, Mapping) else None
    return data


def set_setting(data: dict[str, Any], name: str, value: Any) -> None:
    """Set the setting with a dotted name, in place."""
    *steps, last = name.split(".")
    for step in steps:
        data = data.setdefault(step, {})
        if not isinstance(data, dict):
            raise SettingsError(f"{name}: `{step}` holds a value, expected a group of settings")
    data[last] = value


def set_settings(data: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Set settings by their dotted names, in place, and return `data`; values of None are ignored."""
    for name, value in values.items():
        if value is not None:
            set_setting(data, name, value)
    return data


def require_flags(data: Mapping[str, Any], flags: Mapping[str, str], location: str) -> None:
    """Check that required settings have a value; `flags` maps an option to its setting.

    Raises:
        SettingsError: options are missing; the message lists them with their settings.
    """
    missing = [f"{flag} ({name})" for flag, name in flags.items() if not get_setting(data, name)]
    if missing:
        raise SettingsError(
            f"{location}: missing {', '.join(missing)}; pass an option, or a setting by --set or --config"
        )


def override_settings(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Override nested settings by those of `changes`, in place, and return `base`."""
    for name, value in changes.items():
        group = base.get(name)
        if isinstance(group, dict) and isinstance(value, Mapping):
            override_settings(group, value)
        else:
            base[name] = value
    return base
