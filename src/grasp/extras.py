"""Optional dependencies: declared where they are used, refused with the name of the extra."""

import importlib
from types import ModuleType

from grasp.errors import MissingExtraError


def require(module: str, *, extra: str, feature: str) -> ModuleType:
    """Import `module`, or say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as err:
        raise MissingExtraError(
            f"{feature} needs `{module}`, which is not installed: pip install 'grasp-attribution[{extra}]'"
        ) from err
