"""Import optional dependencies when they are needed, with an error that says how to install a missing one."""

import importlib
import re
from importlib.metadata import PackageNotFoundError, requires
from types import ModuleType

from grasp.errors import MissingExtraError

PACKAGE = "grasp-attribution"


def require(module: str, *, extra: str, feature: str) -> ModuleType:
    """Import and return `module`.

    Raises:
        MissingExtraError: it is not installed; the message has the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as err:
        raise MissingExtraError(f"{feature} needs `{module}`, which is not installed: {install_hint(extra)}") from err


def install_hint(*extras: str) -> str:
    """Return a command that installs the packages of some extras; GRASP itself is not on a package index."""
    try:
        requirements = requires(PACKAGE) or []
    except PackageNotFoundError:  # run from a checkout that was never installed
        requirements = []
    of_extra = re.compile(rf"extra == ['\"](?:{'|'.join(map(re.escape, extras))})['\"]")
    packages = sorted({line.partition(";")[0].strip() for line in requirements if of_extra.search(line)})
    if not packages:
        return f"pip install '.[{','.join(extras)}]' in the checkout of GRASP"
    return f"pip install {' '.join(repr(package) for package in packages)}"
