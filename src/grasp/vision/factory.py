"""Torch modules created by a factory that the settings name: from a package, the current directory or a file.

Start with `make_module`. Loading a factory runs its code, as `python FILE` would, so it is taken from the user's
settings only, never from those recorded in an artifact (`settings.without_foreign_code`).
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
from typing import Any

from torch import nn

from grasp.errors import ModelError
from grasp.vision.settings import ClassifierSettings

FIELD = "model.classifier.factory"
# Everything that the user's code may raise; a script that calls sys.exit raises SystemExit, which is no Exception.
USER_CODE_ERRORS = (Exception, SystemExit)


def make_module(classifier: ClassifierSettings) -> nn.Module:
    """Call the factory that the settings name, with the arguments in the settings, and return the module.

    Raises:
        ModelError: no such module, file or name; its code fails; it returns no torch module, or is not declared to do
            so before it is called (a settings file must not be able to call arbitrary functions).
    """
    assert classifier.factory is not None
    factory = _factory(classifier.factory)
    try:
        model = factory(**classifier.arguments)
    except USER_CODE_ERRORS as err:
        raise ModelError(
            f"{FIELD}: {classifier.factory} failed with {classifier.arguments}: {_describe_error(err)}"
        ) from err
    if not isinstance(model, nn.Module):
        raise ModelError(f"{FIELD}: {classifier.factory} returned a {type(model).__name__}, expected a torch module")
    return model


def user_code(model: nn.Module) -> bytes:
    """Return the source file of a module's class, for fingerprints; empty if the class is from an installed package.

    Files that the source file imports are not included.
    """
    try:
        file = Path(inspect.getfile(type(model))).resolve()
    except (TypeError, OSError):
        return b""
    paths = sysconfig.get_paths()
    installed = [Path(paths[name]).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    packaged = not {"site-packages", "dist-packages"}.isdisjoint(file.parts)  # of the user or of another prefix too
    if packaged or any(file.is_relative_to(directory) for directory in installed) or not file.is_file():
        return b""
    return file.read_bytes()


def _factory(name: str) -> Callable[..., Any]:
    """Import the factory from its name, SOURCE:ATTRIBUTE; check that it is declared to return a torch module.

    A file is run as a module, and can import from its directory.
    """
    location = f"{FIELD}: {name!r}"
    source, colon, attribute_path = name.rpartition(":")
    if not colon or not attribute_path or not source:
        raise ModelError(f"{location}: expected package.module:name or FILE.py:name, e.g. torchvision.models:resnet18")
    try:
        factory: Any
        if source.endswith(".py"):
            if not Path(source).is_file():
                raise ModelError(f"{location}: no such file in {Path.cwd()}; expected Python code")
            path = Path(source).resolve()
            _add_import_path(path.parent)
            module_name = f"grasp_factory_{hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()}"
            spec = importlib.util.spec_from_file_location(module_name, path)
            assert spec is not None
            assert spec.loader is not None
            factory = importlib.util.module_from_spec(spec)
            sys.modules[module_name] = factory  # where dataclasses and pickle look for it
            try:
                spec.loader.exec_module(factory)
            except BaseException:
                del sys.modules[module_name]
                raise
        else:
            _add_import_path(Path.cwd())  # installed modules first, then those in the current directory
            factory = importlib.import_module(source)
        for attribute in attribute_path.split("."):  # Class.method is allowed
            factory = getattr(factory, attribute)
    except ModelError:
        raise
    except USER_CODE_ERRORS as err:
        raise ModelError(
            f"{location}: {_describe_error(err)}; install the package, correct the name, or name a file, as in "
            "path/to/net.py:Net"
        ) from err
    if not _returns_module(factory):
        raise ModelError(
            f"{location}: expected a torch.nn.Module class, a class method of one, or a function annotated to "
            "return one"
        )
    checked_factory: Callable[..., Any] = factory
    return checked_factory


def _add_import_path(directory: Path) -> None:
    """Append a directory to sys.path; installed packages take precedence."""
    if str(directory) not in sys.path:
        sys.path.append(str(directory))
        importlib.invalidate_caches()


def _returns_module(factory: Any) -> bool:
    """Return whether a callable is declared to return a torch module, without calling it."""
    owner = factory if inspect.isclass(factory) else getattr(factory, "__self__", None)  # of a class method: its class
    if inspect.isclass(owner):
        return issubclass(owner, nn.Module)
    if not inspect.isfunction(factory):
        return False
    try:
        returned = typing.get_type_hints(factory).get("return")
    except USER_CODE_ERRORS:  # evaluating an annotation runs code
        return False
    return inspect.isclass(returned) and issubclass(returned, nn.Module)


def _describe_error(err: BaseException) -> str:
    """Format an error in one line; with its type if the text alone is not informative."""
    text = " ".join(str(err).split())
    return text if isinstance(err, ImportError | AttributeError) else f"{type(err).__name__}: {text}"
