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
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grasp.errors import MissingExtraError, SettingsError

_found: dict[tuple[str, ...], dict[str, EntryPoint]] = {}  # by group and sys.path, in which they are found


def entries(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name, in alphabetical order.

    Raises:
        SettingsError: two packages register the same name.
    """
    by_name = _found.setdefault((group, *sys.path), {})
    if not by_name:
        for point in sorted(entry_points(group=group), key=lambda point: point.name):
            if duplicate := by_name.get(point.name):
                by_name.clear()
                packages = f"{package_of(duplicate)} and {package_of(point)}"
                raise SettingsError(
                    f"{kind_of(group)} {point.name}: packages {packages} both register it; uninstall one"
                )
            by_name[point.name] = point
    return by_name


def package_of(point: EntryPoint) -> str:
    """Return the name of the package that registers an object."""
    return point.dist.name if point.dist is not None else "?"


def origin_of(point: EntryPoint) -> str:
    """Return kind, name, object and package of an entry point, for messages."""
    return f"{kind_of(point.group)} {point.name}: {point.value} of package {package_of(point)}"


def kind_of(group: str) -> str:
    """Return what a group registers, such as `kernel` for `grasp.kernels`."""
    return group.removeprefix("grasp.").removesuffix("s")


def summary_of(point: EntryPoint) -> str:
    """Return the first line of the docstring; parses the source instead of importing it, since torch is slow."""
    spec = find_spec(point.module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return ""
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == point.attr:
            return (ast.get_docstring(node) or "").partition("\n")[0]
    return ""


def load(group: str, name: str, base: type[Any] | None = None, error_prefix: str = "") -> Any:
    """Import and return the object that is registered under a name in a group.

    Args:
        group: group of entry points, such as `grasp.kernels`.
        name: name in the group.
        base: class that the object must be derived from. Default: any object.
        error_prefix: begin of the message about an unknown name, such as a settings file. Default: what the group
            registers.
    Raises:
        SettingsError: unknown name, and the message lists the registered ones; or another kind of object.
        MissingExtraError: the module cannot be imported, or lacks the object.
    """
    known = entries(group)
    if name not in known:
        kind, close = kind_of(group), get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        available = ", ".join(known) or f"none: install grasp-attribution with pip to register its {kind}s"
        raise SettingsError(f"{error_prefix or kind}: unknown {kind} {name!r}; {hint}available: {available}")
    try:
        loaded = known[name].load()
    except (ImportError, AttributeError) as err:
        raise MissingExtraError(
            f"{origin_of(known[name])} cannot be imported: {err}; reinstall or uninstall the package"
        ) from err
    if base is not None and not (isinstance(loaded, type) and issubclass(loaded, base)):
        raise SettingsError(
            f"{origin_of(known[name])}: got {loaded!r}, expected a class derived from {base.__module__}.{base.__name__}"
        )
    return loaded
