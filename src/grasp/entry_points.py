"""Entry points: parts of GRASP and of other packages that are found by name and imported on first use.

A package registers an object under a name in its `pyproject.toml`, as GRASP does with its own optional subpackages:

    [project.entry-points."grasp.kernels"]
    loudness = "loud_package.loudness:Loudness"

Groups, with the object that an entry point names:

    grasp.methods     class of a published attribution method (`grasp.methods.contract`)
    grasp.kernels     class of a kernel (`grasp.kernels.kernel`)
    grasp.protocols   scoring rules beyond the additive one (`grasp.predict.scoring_rule`)
    grasp.readers     reader of another form of input
    grasp.commands    Typer application whose commands are added to the command line

Start with `load`.
"""

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


@dataclass(frozen=True, slots=True)
class Entry:
    """A registered object, not imported yet."""

    point: EntryPoint

    @property
    def name(self) -> str:
        """Name under which the object is registered."""
        return self.point.name

    @property
    def package(self) -> str:
        """Name of the package that registers the object."""
        return self.point.dist.name if self.point.dist is not None else "?"

    @property
    def origin(self) -> str:
        """Kind, name, object and package of the entry point, for messages."""
        return f"{kind_of(self.point.group)} {self.name}: {self.point.value} of package {self.package}"

    def summary(self) -> str:
        """Return the first line of the docstring; parses the source instead of importing it, since torch is slow."""
        spec = find_spec(self.point.module)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            return ""
        for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name == self.point.attr:
                return (ast.get_docstring(node) or "").partition("\n")[0]
        return ""

    def load(self) -> Any:
        """Import the module and return the object.

        Raises:
            MissingExtraError: the module cannot be imported, or lacks the object.
        """
        try:
            return self.point.load()
        except (ImportError, AttributeError) as err:
            raise MissingExtraError(
                f"{self.origin} cannot be imported: {err}; reinstall or uninstall the package"
            ) from err


def kind_of(group: str) -> str:
    """Return what a group registers, such as `kernel` for `grasp.kernels`."""
    return group.removeprefix("grasp.").removesuffix("s")


def entries(group: str) -> dict[str, Entry]:
    """Return the entry points of a group by name, in alphabetical order.

    Raises:
        SettingsError: two packages register the same name.
    """
    return _discover(group, tuple(sys.path))


@cache
def _discover(group: str, path: tuple[str, ...]) -> dict[str, Entry]:
    """Return the entry points of a group; `path` is only the key of the cache, since they are found in sys.path."""
    del path
    by_name: dict[str, Entry] = {}
    for entry in map(Entry, sorted(entry_points(group=group), key=lambda point: point.name)):
        if duplicate := by_name.get(entry.name):
            raise SettingsError(
                f"{kind_of(group)} {entry.name}: packages {duplicate.package} and {entry.package} both register it; "
                "uninstall one"
            )
        by_name[entry.name] = entry
    return by_name


def names(group: str) -> list[str]:
    """Return the names that are registered in a group, in alphabetical order."""
    return list(entries(group))


def find(group: str, name: str, error_prefix: str = "") -> Entry:
    """Return an entry point by name.

    Args:
        group: group of entry points, such as `grasp.kernels`.
        name: name in the group.
        error_prefix: begin of the error message, such as a settings file. Default: what the group registers.
    Raises:
        SettingsError: unknown name; the message lists the registered ones.
    """
    known, kind = entries(group), kind_of(group)
    if name not in known:
        close = get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        available = ", ".join(known) or f"none: install grasp-attribution with pip to register its {kind}s"
        raise SettingsError(f"{error_prefix or kind}: unknown {kind} {name!r}; {hint}available: {available}")
    return known[name]


def load(group: str, name: str) -> Any:
    """Import and return the object that is registered under a name in a group.

    Raises:
        SettingsError: unknown name; the message lists the registered ones.
        MissingExtraError: it cannot be imported.
    """
    return find(group, name).load()
