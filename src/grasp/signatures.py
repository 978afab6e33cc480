"""Read the arguments of a public function from its source: names, types and defaults, and descriptions in `Args:`.

Command-line options and MCP tools are generated from them. The module is parsed, not imported, so that `--help` stays
fast. In a description, the text after "In Python" applies to Python only and is left out. Start with `parse_signature`.
"""

import ast
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

REQUIRED: Final = inspect.Parameter.empty
TEXT_TYPES: Final = {text_type.__name__: text_type for text_type in (str, int, float, bool, Path)}
_OTHER_GENERICS: Final = re.compile(r"\bCallable\[.*]|\b(?!Sequence\b)\w+\[[^][]*]")  # such as Mapping[str, Any]
PATH_ALIASES: Final = {"Place": Path, "Runs": Path}  # type aliases of `grasp.api` for a path or the opened object


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument that can be passed as text.

    Attributes:
        name: name of the argument.
        kind: the first type of its union that can be passed as text: str, int, float, bool or Path.
        default: its default; REQUIRED if it has none, () if it may be repeated.
        in_commas: whether the text has several names, separated by commas.
        about: description of the argument.
    """

    name: str
    kind: type
    default: Any
    in_commas: bool
    about: str

    @property
    def repeatable(self) -> bool:
        """Return whether the argument may be repeated."""
        return isinstance(self.default, tuple)

    @property
    def annotation(self) -> Any:
        """Return its type when it is passed as text, e.g. `int | None` or `list[Path]`."""
        if self.repeatable:
            return list[self.kind]  # type: ignore[name-defined]
        return self.kind | None if self.default is None else self.kind


@dataclass(frozen=True, slots=True)
class Signature:
    """The description of a public function and its arguments, in the order of the signature."""

    about: str
    arguments: Mapping[str, Argument]


@cache
def parse_signature(module: str, verb: str) -> Signature:
    """Parse the signature and the docstring of a function. Arguments that cannot be passed as text are left out.

    Args:
        module: dotted name of the module.
        verb: name of the function.
    """
    # only the signature and the docstring, which are a valid function by themselves: faster than the whole module
    pattern = re.compile(rf'^def {verb}\(.*?""".*?"""', re.MULTILINE | re.DOTALL)
    (function,) = (node for head in pattern.findall(_source(module)) for node in ast.parse(head).body)
    assert isinstance(function, ast.FunctionDef)
    # the text before the sections, and the description of each argument, without "In Python"
    about, _, remainder = (ast.get_docstring(function) or "").partition("\nArgs:\n")
    section = re.split(r"^\S", remainder, maxsplit=1, flags=re.MULTILINE)[0]
    _, *entries = re.split(r"^ {4}(\w+): ", section, flags=re.MULTILINE)
    about, *descriptions = (
        re.split(r"\s+In Python\b", text)[0] for text in (about, *(" ".join(entry.split()) for entry in entries[1::2]))
    )
    texts = dict(zip(entries[::2], descriptions, strict=True))
    parameters, arguments = function.args, {}
    required = [None] * (len(parameters.args) - len(parameters.defaults))
    defaults = [*required, *parameters.defaults, *parameters.kw_defaults]
    for argument, node in zip([*parameters.args, *parameters.kwonlyargs], defaults, strict=True):
        annotation = "" if argument.annotation is None else ast.unparse(argument.annotation)
        words = re.findall(r"\w+", _OTHER_GENERICS.sub("", annotation))
        types = [(TEXT_TYPES | PATH_ALIASES)[word] for word in words if word in TEXT_TYPES | PATH_ALIASES]
        if types:
            default = _value(module, node) if node else None if "None" in words else REQUIRED
            in_commas = types[0] is str and "Sequence" in words and default != ()
            arguments[argument.arg] = Argument(argument.arg, types[0], default, in_commas, texts.get(argument.arg, ""))
    return Signature(about.strip(), arguments)


def signed(function: Any, parameters: Mapping[str, tuple[Any, Any]], about: str, returns: Any = None) -> None:
    """Set signature, annotations and docstring of a function with arbitrary keywords, for libraries that inspect them.

    Args:
        function: the function.
        parameters: type and default by name.
        about: its docstring.
        returns: type of its result.
    """
    signature_parameters = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=kind)
        for name, (kind, default) in parameters.items()
    ]
    required_first = sorted(signature_parameters, key=lambda parameter: parameter.default is not REQUIRED)
    function.__signature__ = inspect.Signature(required_first, return_annotation=returns)
    function.__annotations__ = {name: kind for name, (kind, _) in parameters.items()} | {"return": returns}
    function.__doc__ = about


def _source(module: str) -> str:
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


def _value(module: str, node: ast.expr) -> Any:
    """Evaluate a default: a literal, or a constant of the module or of a module that it imports from."""
    if not isinstance(node, ast.Name):
        return ast.literal_eval(node)
    value = None
    for statement in ast.parse(_source(module)).body:
        match statement:
            case ast.Assign(targets=[ast.Name(node.id)]):
                value = _value(module, statement.value)
            case ast.ImportFrom() if statement.module and node.id in [alias.name for alias in statement.names]:
                value = _value(statement.module, node)
    assert value is not None
    return value
