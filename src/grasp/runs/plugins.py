"""Which methods there are: those that installed packages name under the entry point group `grasp.methods`."""

import ast
import sys
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grasp.errors import MissingExtraError, SettingsError
from grasp.runs.contract import Method

GROUP = "grasp.methods"


@dataclass(frozen=True, slots=True)
class Entry:
    """A method by name."""

    point: EntryPoint

    @property
    def name(self) -> str:
        """What it is asked for by."""
        return self.point.name

    @property
    def package(self) -> str:
        """The package that brings it."""
        return self.point.dist.name if self.point.dist is not None else "?"

    def says(self) -> str:
        """First line of its docstring; read from the source, since a list of methods must not wait for torch."""
        spec = find_spec(self.point.module)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            return ""
        for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name == self.point.attr:
                return (ast.get_docstring(node) or "").partition("\n")[0]
        return ""

    def load(self) -> type[Method[Any]]:
        """The class; its module is imported here, and torch only with those that need it.

        Raises:
            MissingExtraError: it cannot be imported.
            SettingsError: it is no method.
        """
        where = f"method {self.name}: {self.point.value} of package {self.package}"
        try:
            kind = self.point.load()
        except (ImportError, AttributeError) as err:
            raise MissingExtraError(f"{where} cannot be imported: {err}; repair the package or uninstall it") from err
        if not (isinstance(kind, type) and issubclass(kind, Method)):
            raise SettingsError(f"{where}: got {kind!r}, expected a class derived from grasp.runs.contract.Method")
        return kind


def methods() -> dict[str, Entry]:
    """All methods by name.

    Raises:
        SettingsError: two packages have a method of one name.
    """
    return _installed(tuple(sys.path))


@cache
def _installed(path: tuple[str, ...]) -> dict[str, Entry]:
    del path  # what is installed is looked for along it
    found: dict[str, Entry] = {}
    for entry in map(Entry, sorted(entry_points(group=GROUP), key=lambda point: point.name)):
        if other := found.get(entry.name):
            raise SettingsError(
                f"method {entry.name}: packages {other.package} and {entry.package} both have one; uninstall either"
            )
        found[entry.name] = entry
    return found


def entry_of(name: str, where: str = "method") -> Entry:
    """A method by name.

    Args:
        where: what a message names.
    Raises:
        SettingsError: no such method; the message lists those there are.
    """
    known = methods()
    if name not in known:
        close = get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        there = ", ".join(known) or "none: install grasp-attribution with pip, which makes its methods known"
        raise SettingsError(f"{where}: got {name!r}; {hint}there are {there}")
    return known[name]
