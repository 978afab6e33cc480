"""Methods as they are asked for: by name, or by a label that a settings file gives to a configuration.

tracin: {projection: 64}                          # settings of a method under its own name
tracin-all: {method: tracin, layers: all}         # another configuration beside it
trak-best: {method: trak, oracle_selected: true}  # chosen on the utilities that it will be judged by
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from grasp.baselines.base import Method
from grasp.baselines.registry import METHODS, entry_of
from grasp.errors import SettingsError
from grasp.extras import require
from grasp.settings import describe

GRASP = "grasp"  # may be named among the methods; its own predictions are always there
RESERVED = ("method", "seed", "oracle_selected")


@dataclass(frozen=True, slots=True)
class AskedMethod:
    """One configuration of one method."""

    label: str
    name: str
    method: Method[Any]
    oracle_selected: bool = False


def asked_methods(
    names: Sequence[str] | None, configured: Mapping[str, Any] | None = None, where: str = "methods"
) -> tuple[AskedMethod, ...]:
    """Methods by name or label, ready to run; their modules are imported here.

    Args:
        names: None: every configuration of the file.
        configured: by label: settings of the method, and `method`, `seed`, `oracle_selected`.
        where: what a message about the configurations names.
    Raises:
        SettingsError: no such method (those there are are listed), settings that it does not have, or of a wrong kind.
        MissingExtraError: what a method needs is not installed; the message names the extra.
    """
    given = dict(configured or {})
    chosen = list(given) if names is None else [name for name in names if name != GRASP]
    twice = sorted({name for name in chosen if chosen.count(name) > 1})
    if twice:
        raise SettingsError(f"methods: got {', '.join(twice)} twice; give one of them another label in a settings file")
    for label, values in given.items():
        _split(label, values, where)  # a mistake in what is not asked for is a mistake all the same
    return tuple(_asked(name, given.get(name, {}), where, labels=given) for name in chosen)


def _asked(label: str, values: Any, where: str, labels: Mapping[str, Any]) -> AskedMethod:
    if label not in labels and label not in METHODS:
        if not labels:
            entry_of(label)  # says which there are
        raise SettingsError(
            f"methods: got {label!r}; {where} has {', '.join(labels)}, and there are {', '.join(METHODS)}"
        )
    name, seed, oracle_selected, own = _split(label, values, where)
    kind = entry_of(name).load()
    for module, extra in kind.needs_modules.items():
        require(module, extra=extra, feature=f"method {name}")
    try:
        settings = kind.settings_type.model_validate(own)
    except ValidationError as err:
        raise SettingsError(describe(err, f"{where}: {label}", kind.settings_type)) from err
    return AskedMethod(label, name, kind(settings, seed=seed), oracle_selected)


def _split(label: str, values: Any, where: str) -> tuple[str, int, bool, dict[str, Any]]:
    """Name, seed and standing of a configuration, and its settings."""
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        raise SettingsError(f"{where}: {label}: got {values!r}, expected settings by name, or {{}}")
    own = dict(values)
    name, seed, oracle_selected = (
        own.pop(field, default) for field, default in zip(RESERVED, (label, 0, False), strict=True)
    )
    if name not in METHODS and "method" not in values:
        raise SettingsError(
            f"{where}: {label} is no method; name its method: {label}: {{method: ..., ...}}, one of "
            f"{', '.join(METHODS)}"
        )
    entry_of(str(name))
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise SettingsError(f"{where}: {label}.seed: got {seed!r}, expected a whole number from 0")
    if not isinstance(oracle_selected, bool):
        raise SettingsError(f"{where}: {label}.oracle_selected: got {oracle_selected!r}, expected true or false")
    return str(name), seed, oracle_selected, own
