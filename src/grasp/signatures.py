"""What a verb takes, declared once: its signature says names, kinds and defaults, its `Args:` what each is for.

Options of commands and tools of agents are made from that. It is read from the source of the verb's module, which is
not imported: help stays quick. What only Python can give comes last in a text, after "In Python".
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
PLACES: Final = {"Place": Path, "Runs": Path}  # words of `grasp.api.retrain` for a path, or what lies there


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a verb that can be written as text."""

    name: str
    kind: type  # the first of its forms that can be written: str, int, float, bool or Path
    default: Any  # REQUIRED where it has none; () where it may be given several times
    in_commas: bool  # several names in one text, with commas between them
    about: str

    @property
    def repeatable(self) -> bool:
        """Whether it may be given several times."""
        return isinstance(self.default, tuple)

    @property
    def annotation(self) -> Any:
        """Its type where it is given as text, e.g. `int | None` or `list[Path]`."""
        if self.repeatable:
            return list[self.kind]  # type: ignore[name-defined]
        return self.kind | None if self.default is None else self.kind


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a verb is for, and what it takes, in the order of its signature."""

    about: str
    arguments: Mapping[str, Argument]


@cache
def declared(module: str, verb: str) -> Declaration:
    """Read what a verb declares.

    Args:
        module: dotted name.
        verb: a function of the module.
    """
    begins = re.compile(rf'^def {verb}\(.*?""".*?"""', re.MULTILINE | re.DOTALL)  # all that is parsed, to be quick
    (function,) = (node for head in begins.findall(_source(module)) for node in ast.parse(head).body)
    assert isinstance(function, ast.FunctionDef)
    about, texts = _documented(ast.get_docstring(function) or "")
    given, found = function.args, {}
    required = [None] * (len(given.args) - len(given.defaults))
    defaults = [*required, *given.defaults, *given.kw_defaults]
    for argument, node in zip([*given.args, *given.kwonlyargs], defaults, strict=True):
        forms = list(_forms(argument.annotation))
        kinds = [kind for form in forms if (kind := (KINDS | PLACES).get(form))]
        if kinds:
            default = _value(module, node) if node else None if "None" in forms else REQUIRED
            listed = kinds[0] is str and "Sequence" in forms and default != ()
            found[argument.arg] = Argument(argument.arg, kinds[0], default, listed, texts.get(argument.arg, ""))
    return Declaration(about, found)


def signed(function: Any, parameters: Mapping[str, tuple[Any, Any]], about: str, returns: Any = None) -> None:
    """Give a function of any keywords a signature and a text, for libraries that ask it for them.

    Args:
        parameters: type and default by name.
    """
    found = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=kind)
        for name, (kind, default) in parameters.items()
    ]
    required_first = sorted(found, key=lambda parameter: parameter.default is not REQUIRED)
    function.__signature__ = inspect.Signature(required_first, return_annotation=returns)
    function.__annotations__ = {name: kind for name, (kind, _) in parameters.items()} | {"return": returns}
    function.__doc__ = about


def _source(module: str) -> str:
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


def _documented(docstring: str) -> tuple[str, dict[str, str]]:
    """What a docstring says before its sections, and of each argument."""
    about, _, rest = docstring.partition("\nArgs:\n")
    section = re.split(r"^\S", rest, maxsplit=1, flags=re.MULTILINE)[0]
    _, *entries = re.split(r"^ {4}(\w+): ", section, flags=re.MULTILINE)
    texts = {name: " ".join(text.split()) for name, text in zip(entries[::2], entries[1::2], strict=True)}
    return _for_all(about).strip(), {name: _for_all(text) for name, text in texts.items()}


def _for_all(text: str) -> str:
    return re.split(r"\s+In Python\b", text)[0]


def _forms(annotation: ast.expr | None) -> Iterator[str]:
    """Names in a union of types; those in a sequence count as well."""
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
    """A default: a literal, or a constant of the module or of one that it imports from."""
    if not isinstance(node, ast.Name):
        return ast.literal_eval(node)
    for statement in ast.parse(_source(module)).body:
        match statement:
            case ast.Assign(targets=[ast.Name(node.id)]):
                return _value(module, statement.value)
            case ast.ImportFrom() if statement.module and node.id in [alias.name for alias in statement.names]:
                return _value(statement.module, node)
    raise NameError(f"{module}: no constant {node.id}")
