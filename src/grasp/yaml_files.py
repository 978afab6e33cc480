"""What people write, and what is wrong in it: YAML files, and the mistakes of all settings in one line.

The only place that reads or writes YAML. Leaves of nested settings have a dotted path, e.g. `model.classifier.factory`.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from grasp.errors import GraspError, SettingsError
from grasp.files import write_whole
from grasp.text import plain

DEEPEST = 50  # levels of a YAML file
MOST_BYTES = 4 << 20  # of a YAML file
MOST_VALUES = 100_000  # of a YAML file: alias bombs have billions
SHOWN = 200  # characters of a wrong field or value in a message
MOST_SHOWN = 20  # mistakes in a message

M = TypeVar("M", bound=BaseModel)


def validated(kind: type[M], data: Mapping[str, Any], where: str, mistake: type[GraspError] = SettingsError) -> M:
    """Check `data` and freeze it; every mismatch is in the message, which `where` begins."""
    try:
        return kind.model_validate(data)
    except ValidationError as err:
        raise mistake(describe(err, where, kind)) from err


def validated_yaml(kind: type[M], path: Path | str, what: str, mistake: type[GraspError]) -> M:
    """Read a YAML file (JSON is YAML too), check it and freeze it."""
    try:
        data = read_yaml(Path(path))
    except SettingsError as err:
        raise mistake(str(err)) from err
    return validated(kind, data, f"{what} {path}", mistake)


def describe(err: ValidationError, where: str, kind: type[BaseModel] | None = None) -> str:
    """The mismatches, in one line; with the settings' class also what a misspelt field may have meant."""
    parts = []
    for item in err.errors()[:MOST_SHOWN]:
        field = plain(".".join(str(step) for step in item["loc"]), SHOWN)
        got = "" if item["type"] in ("missing", "value_error") else f", got {plain(repr(item['input']), SHOWN)}"
        if item["type"] == "string_type" and isinstance(item["input"], dict):
            got += "; a text with : or {} stands in quotes of its own, --set 'NAME=\"...\"'"
        what = _WORDS.get(item["type"], item["msg"].removeprefix("Value error, "))
        parts.append(f"{field}: {what}{got}{_meant(kind, item)}".removeprefix(": "))
    more = f"; {err.error_count() - MOST_SHOWN} more" if err.error_count() > MOST_SHOWN else ""
    return f"{where}: " + "; ".join(parts) + more


_WORDS = {
    "missing": "missing",
    "extra_forbidden": "no such field",
    "model_type": "expected fields with names",
    "tuple_type": "expected a list",
    "string_pattern_mismatch": "no name of ours",
    "string_too_long": "no name of ours",
}


def _meant(kind: type[BaseModel] | None, item: Mapping[str, Any]) -> str:
    if kind is None or item["type"] != "extra_forbidden":
        return ""
    *groups, leaf = (str(step) for step in item["loc"])
    for group in groups:
        inner = kind.model_fields[group].annotation if group in kind.model_fields else None
        if not isinstance(inner, type) or not issubclass(inner, BaseModel):
            return ""
        kind = inner
    close = get_close_matches(leaf, kind.model_fields, n=1)
    return f" (did you mean {close[0]}?)" if close else f" (there are: {', '.join(kind.model_fields)})"


class _Refused(yaml.YAMLError):
    """What is YAML, and not what a person writes: the message says where."""


class _Loader(yaml.SafeLoader):
    """Plain YAML in which no mapping has a key twice, and which no alias or nesting blows up."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._values = 0  # values as they are once every alias is written out
        self._size: dict[Any, int] = {}  # by node

    def compose_node(self, parent: Any, index: Any) -> Any:
        is_alias, line, before = self.check_event(yaml.AliasEvent), self.line + 1, self._values
        self._depth += 1
        if self._depth > DEEPEST:
            raise _Refused(f"line {line}: nested deeper than {DEEPEST}")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias and node not in self._size:
            raise _Refused(f"line {line}: a value that holds itself")
        self._values += self._size[node] if is_alias else 1
        if self._values > MOST_VALUES:
            raise _Refused(f"line {line}: more than {MOST_VALUES:,} values, aliases written out")
        self._size.setdefault(node, self._values - before)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if (key.tag, key.value) in first:
                raise _Refused(
                    f"line {line}: {key.value!r} is there already, in line {first[key.tag, key.value]}; leave one out"
                )
            first[key.tag, key.value] = line
        return node


def parse_yaml(text: str, where: str) -> Any:
    """A YAML value of a person's size; `where` begins the message that refuses anything else."""
    try:
        return yaml.load(text, Loader=_Loader)
    except _Refused as err:
        raise SettingsError(f"{where}: {err}") from err
    except (yaml.YAMLError, ValueError) as err:  # ValueError: a date that there is not, a number of 5,000 digits
        raise SettingsError(f"{where}: not YAML: {plain(err, SHOWN)}") from err


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping; anything else is refused, and so is a key that stands twice."""
    try:
        with path.open("rb") as file:  # /dev/zero has no end
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise SettingsError(f"{path}: more than {MOST_BYTES:,} bytes; expected a YAML file of settings")
        data = parse_yaml(content.decode(), str(path))
    except FileNotFoundError as err:
        raise SettingsError(f"{path}: no such settings file") from err
    except OSError as err:
        raise SettingsError(f"{path}: cannot be read: {err.strerror}; expected a YAML file of settings") from err
    except UnicodeDecodeError as err:
        raise SettingsError(f"{path}: not YAML: {err}") from err
    if not isinstance(data, dict):
        raise SettingsError(f"{path}: got {type(data).__name__}, expected a mapping of settings")
    return data


def plain_settings(given: Mapping[str, Any] | Path | str | None) -> dict[str, Any]:
    """Nested settings that may be changed: those given, those of a YAML file, or none."""
    if isinstance(given, Mapping):
        return deepcopy(dict(given))
    return read_yaml(Path(given)) if given else {}


def write_yaml(data: dict[str, Any], path: Path) -> None:
    """A reader never sees half a file."""
    write_whole(path, yaml_text(data).encode())


def yaml_text(data: Mapping[str, Any]) -> str:
    """A mapping as YAML, in the order that it has."""
    return yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True)


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


def require_flags(data: Mapping[str, Any], flags: Mapping[str, Sequence[str]], where: str) -> None:
    """See that nothing is left out; `flags` maps a flag to the leaves of which one must have a value.

    Raises:
        SettingsError: every flag that is missing, with the setting that it stands for.
    """
    missing = [f"{flag} ({paths[0]})" for flag, paths in flags.items() if not any(leaf(data, path) for path in paths)]
    if missing:
        raise SettingsError(
            f"{where}: missing {', '.join(missing)}; give it as an argument, or in the settings (--set, --config)"
        )


def pop_leaf(data: dict[str, Any], name: str) -> Any:
    """Remove a leaf, and the groups that it leaves empty; None where there is nothing."""
    step, _, rest = name.partition(".")
    if not rest:
        return data.pop(step, None)
    group = data.get(step)
    if not isinstance(group, dict):
        return None
    value = pop_leaf(group, rest)
    if not group:
        del data[step]
    return value


def over(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings, one over the other."""
    for name, value in above.items():
        inner = below.get(name)
        below[name] = over(inner, value) if isinstance(inner, dict) and isinstance(value, Mapping) else value
    return below
