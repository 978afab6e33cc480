"""Read the arguments of a public function from its source: names, types and defaults, and descriptions in `Args:`.

Command-line options and MCP tools are generated from them. The module is parsed, not imported, so that `--help` stays
fast. In a description, the text after "In Python" applies to Python only and is left out. Start with `parse_signature`.
"""

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

REQUIRED: Final = inspect.Parameter.empty
KINDS: Final = {kind.__name__: kind for kind in (str, int, float, bool, Path)}
PLACES: Final = {"Place": Path, "Runs": Path}  # type aliases of `grasp.api.retrain` for a path or the opened object


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument that can be passed as text."""

    name: str
    kind: type  # the first type of its union that can be passed as text: str, int, float, bool or Path
    default: Any  # REQUIRED if it has none; () if it may be repeated
    in_commas: bool  # several names in one text, separated by commas
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
    """Parse the signature and the docstring of the function `verb` of a module, given its dotted name."""
    begins = re.compile(rf'^def {verb}\(.*?""".*?"""', re.MULTILINE | re.DOTALL)  # its head only
    (function,) = (node for head in begins.findall(_source(module)) for node in ast.parse(head).body)
    assert isinstance(function, ast.FunctionDef)
    about, texts = _documented(ast.get_docstring(function) or "")
    parameters, arguments = function.args, {}
    required = [None] * (len(parameters.args) - len(parameters.defaults))
    defaults = [*required, *parameters.defaults, *parameters.kw_defaults]
    for argument, node in zip([*parameters.args, *parameters.kwonlyargs], defaults, strict=True):
        forms = list(_forms(argument.annotation))
        kinds = [kind for form in forms if (kind := (KINDS | PLACES).get(form))]
        if kinds:
            default = _value(module, node) if node else None if "None" in forms else REQUIRED
            listed = kinds[0] is str and "Sequence" in forms and default != ()
            arguments[argument.arg] = Argument(argument.arg, kinds[0], default, listed, texts.get(argument.arg, ""))
    return Signature(about, arguments)


def signed(function: Any, parameters: Mapping[str, tuple[Any, Any]], about: str, returns: Any = None) -> None:
    """Set signature, annotations and docstring of a function with arbitrary keywords, for libraries that inspect them.

    Args:
        parameters: type and default by name.
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


def _documented(docstring: str) -> tuple[str, dict[str, str]]:
    """Return the text of a docstring before its sections, and the description of each argument."""
    about, _, rest = docstring.partition("\nArgs:\n")
    section = re.split(r"^\S", rest, maxsplit=1, flags=re.MULTILINE)[0]
    _, *entries = re.split(r"^ {4}(\w+): ", section, flags=re.MULTILINE)
    texts = {name: " ".join(text.split()) for name, text in zip(entries[::2], entries[1::2], strict=True)}
    return _for_all(about).strip(), {name: _for_all(text) for name, text in texts.items()}


def _for_all(text: str) -> str:
    return re.split(r"\s+In Python\b", text)[0]


def _forms(annotation: ast.expr | None) -> Iterator[str]:
    """Yield the names of a union of types, including the item types of sequences."""
    match annotation:
        case ast.BinOp():
            yield from _forms(annotation.left)
            yield from _forms(annotation.right)
        case ast.Constant(value=str(text)):
            yield from _forms(ast.parse(text, mode="eval").body)
        case ast.Constant(value=None):
            yield "None"
        case ast.Subscript(value=ast.Name("Sequence")):
            yield "Sequence"
            yield from _forms(annotation.slice)
        case ast.Name(name):
            yield name


def _value(module: str, node: ast.expr) -> Any:
    """Evaluate a default: a literal, or a constant of the module or of a module that it imports from."""
    if not isinstance(node, ast.Name):
        return ast.literal_eval(node)
    for statement in ast.parse(_source(module)).body:
        match statement:
            case ast.Assign(targets=[ast.Name(node.id)]):
                return _value(module, statement.value)
            case ast.ImportFrom() if statement.module and node.id in [alias.name for alias in statement.names]:
                return _value(statement.module, node)
    raise NameError(f"{module}: no constant {node.id}")
