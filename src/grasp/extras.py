"""Import optional dependencies where they are used, and say how to install the ones that are missing."""

import importlib
import re
from importlib.metadata import PackageNotFoundError, requires
from types import ModuleType

from grasp.errors import MissingExtraError

PACKAGE = "grasp-attribution"


def require(module: str, *, extra: str, feature: str) -> ModuleType:
    """Import `module`, or say which packages of which extra bring it."""
    try:
        return importlib.import_module(module)
    except ImportError as err:
        raise MissingExtraError(f"{feature} needs `{module}`, which is not installed: {install_hint(extra)}") from err


def install_hint(*extras: str) -> str:
    """Return a command that installs what some extras bring; GRASP itself is on no package index."""
    try:
        declared = requires(PACKAGE) or []
    except PackageNotFoundError:  # run from a checkout that was never installed
        declared = []
    of_extra = re.compile(rf"extra == ['\"](?:{'|'.join(map(re.escape, extras))})['\"]")
    packages = sorted({line.partition(";")[0].strip() for line in declared if of_extra.search(line)})
    if not packages:
        return f"pip install '.[{','.join(extras)}]' in the checkout of GRASP"
    return f"pip install {' '.join(repr(package) for package in packages)}"
