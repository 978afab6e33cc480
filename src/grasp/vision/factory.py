"""A torch module that is made by what the settings name: of a package, of the current directory, of a file.

Naming it runs its code, as `python FILE` would: a factory comes from the user's own settings, never from those that an
artifact records (`settings.without_foreign_code`).
"""

import hashlib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import typing
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from grasp.errors import ModelError
from grasp.settings import ClassifierSettings

FIELD = "model.classifier.factory"
# whatever a module of the user's own raises while it is run, the end of a script included
FAILURES = (Exception, SystemExit)


def make_module(chosen: ClassifierSettings) -> nn.Module:
    """The module that the factory makes of its arguments.

    Raises:
        ModelError: no such module, file or name; its code fails; it makes something else, or nothing that can be told
            before it is called: a settings file must not call what it likes.
    """
    assert chosen.factory is not None
    factory = _factory(chosen.factory)
    try:
        model = factory(**chosen.arguments)
    except FAILURES as err:
        raise ModelError(f"{FIELD}: {chosen.factory} failed with {chosen.arguments}: {_said(err)}") from err
    if not isinstance(model, nn.Module):
        raise ModelError(f"{FIELD}: {chosen.factory} gave a {type(model).__name__}, no torch module")
    return model


def own_code(model: nn.Module) -> bytes:
    """The file that defines a module's class, unless a package brings it; what that file imports is not seen."""
    try:
        file = Path(inspect.getfile(type(model))).resolve()
    except (TypeError, OSError):
        return b""
    paths = sysconfig.get_paths()
    installed = [Path(paths[name]).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    if any(file.is_relative_to(place) for place in installed) or not file.is_file():
        return b""
    return file.read_bytes()


def _factory(name: str) -> Callable[..., Any]:
    where = f"{FIELD}: {name!r}"
    source, colon, path = name.rpartition(":")
    if not colon or not path or not source:
        raise ModelError(f"{where}: expected package.module:name or FILE.py:name, e.g. torchvision.models:resnet18")
    try:
        if source.endswith(".py"):
            found: Any = _from_file(Path(source), where)
        else:
            _look_in(Path.cwd())  # a module that is installed, or else lies in the current directory
            found = importlib.import_module(source)
        for step in path.split("."):
            found = getattr(found, step)
    except ModelError:
        raise
    except FAILURES as err:
        raise ModelError(
            f"{where}: {_said(err)}; install the package, mend the name, or name a file, as in path/to/net.py:Net"
        ) from err
    if not _makes_modules(found):
        raise ModelError(
            f"{where}: expected a class of torch.nn.Module, a class method of one, or a function annotated to give one"
        )
    made: Callable[..., Any] = found
    return made


def _from_file(path: Path, where: str) -> ModuleType:
    """A file run as a module; what lies beside it can be imported by it."""
    if not path.is_file():
        raise ModelError(f"{where}: no such file, seen from {Path.cwd()}; expected Python code")
    path = path.resolve()
    _look_in(path.parent)
    name = f"grasp_factory_{hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and pickle look for it
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _look_in(directory: Path) -> None:
    """Import from a directory too, after all that is installed: a folder of one's own hides no package."""
    if str(directory) not in sys.path:
        sys.path.append(str(directory))
        importlib.invalidate_caches()


def _makes_modules(found: Any) -> bool:
    owner = found if inspect.isclass(found) else getattr(found, "__self__", None)
    if inspect.isclass(owner):
        return issubclass(owner, nn.Module)
    if not inspect.isfunction(found):
        return False
    try:
        returned = typing.get_type_hints(found).get("return")
    except FAILURES:  # an annotation is code too
        return False
    return inspect.isclass(returned) and issubclass(returned, nn.Module)


def _said(err: BaseException) -> str:
    """An error in one line; those whose text alone says little with their kind."""
    text = " ".join(str(err).split())
    return text if isinstance(err, ImportError | AttributeError) else f"{type(err).__name__}: {text}"
