"""Methods as they are asked for: by name, or by a label that a settings file gives to a configuration.

tracin: {projection: 64}                          # settings of a method under its own name
tracin-all: {method: tracin, layers: all}         # another configuration beside it
trak-best: {method: trak, oracle_selected: true}  # chosen on the utilities that it will be judged by
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field, ValidationError

from grasp.baselines.base import Method, SubsetMethod
from grasp.baselines.registry import METHODS, entry_of
from grasp.errors import SettingsError
from grasp.extras import require
from grasp.fidelity.predictions import Weighting
from grasp.settings import Settings, describe

GRASP = "grasp"  # may be named among the methods; its own predictions are always there


class _Beside(Settings):
    """What a configuration may have beside its settings."""

    method: str
    seed: int = Field(0, ge=0)
    oracle_selected: bool = False
    weighting: Weighting | None = None
    negative: float = Field(1.0, ge=0, le=1)


@dataclass(frozen=True, slots=True)
class AskedMethod:
    """One configuration of one method."""

    label: str
    name: str
    method: Method[Any]
    oracle_selected: bool = False
    weighting: Weighting | None = None  # None: the method's own
    negative: float = 1.0  # what negative scores of rows are multiplied by, where subsets are predicted


def asked_methods(
    names: Sequence[str] | None, configured: Mapping[str, Any] | None = None, where: str = "methods"
) -> tuple[AskedMethod, ...]:
    """Methods by name or label, ready to run; their modules are imported here.

    Args:
        names: None: every configuration of the file.
        configured: by label: settings of the method, and `method`, `seed`, `oracle_selected`, `weighting`, `negative`.
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
    beside, own = _split(label, values, where)
    kind = entry_of(beside.method).load()
    for module, extra in kind.needs_modules.items():
        require(module, extra=extra, feature=f"method {beside.method}")
    try:
        settings = kind.settings_type.model_validate(own)
    except ValidationError as err:
        raise SettingsError(describe(err, f"{where}: {label}", kind.settings_type)) from err
    method = kind(settings, seed=beside.seed)
    if beside.negative != 1.0 and isinstance(method, SubsetMethod):
        raise SettingsError(
            f"{where}: {label}: negative: {beside.method} predicts subsets and scores no rows; leave it out"
        )
    return AskedMethod(label, beside.method, method, beside.oracle_selected, beside.weighting, beside.negative)


def _split(label: str, values: Any, where: str) -> tuple[_Beside, dict[str, Any]]:
    """What stands beside the settings of a configuration, and the settings."""
    if not isinstance(values, Mapping):
        raise SettingsError(f"{where}: {label}: got {values!r}, expected settings by name, or {{}}")
    if label not in METHODS and "method" not in values:
        raise SettingsError(
            f"{where}: {label} is no method; name its method: {label}: {{method: ..., ...}}, one of "
            f"{', '.join(METHODS)}"
        )
    own = {str(key): value for key, value in values.items()}
    given = {field: own.pop(field) for field in _Beside.model_fields if field in own}
    try:
        beside = _Beside.model_validate({"method": label} | given, strict=True)
    except ValidationError as err:
        raise SettingsError(describe(err, f"{where}: {label}", _Beside)) from err
    entry_of(beside.method)
    return beside, own
