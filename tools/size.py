"""Count the size of `src/grasp`, and compare it with the limits in `tools/size.toml`, which only decrease.

    python tools/size.py              # by package: lines, lines of code, functions, raise, words; options of commands
    python tools/size.py --roads      # also the functions that each command executes on a small corpus (slow)
    python tools/size.py --names      # also their names, in the order of the first call
    python tools/size.py --check      # exit 1 if a number is above its limit
    python tools/size.py --update     # lower the limits to the numbers

Lines of code are lines with a token, without blank lines, comments and docstrings. Words are those of strings of two
or more, docstrings apart: help, messages and other texts. The core is all but the optional packages. With `--check`
and `--update`, commands are only executed with `--roads`.

Of commands, calls in every thread are counted. Lambdas and comprehensions belong to their function; code that runs
while a module is imported is not counted. Depth is the maximum depth of the call stack. Changes of module: how often a
reader changes the file when reading the functions in the order of their first call. First row: the position, in this
order, of the function in which the first row meets the model.
"""

import argparse
import ast
import io
import os
import re
import sys
import tempfile
import threading
import tokenize
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from itertools import groupby, pairwise
from multiprocessing import get_context
from pathlib import Path
from types import CodeType, FrameType
from typing import TypeGuard

import typer

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # the tests' corpus, and this checkout, from any directory

import grasp.cli  # noqa: E402
from grasp.yaml_files import write_yaml  # noqa: E402

SOURCE = ROOT / "src" / "grasp"
LIMITS = ROOT / "tools" / "size.toml"
PACKAGE = str(SOURCE) + os.sep
TOP = "."  # stands for the modules outside of packages
# packages that are not part of the core
OPTIONAL = (
    "baselines",
    "demo",
    "distil",
    "formats",
    "merging",
    "mixing",
    "monitor",
    "paper",
    "previews",
    "retraining",
    "serving",
    "vision",
)
COLUMNS = ("lines", "code", "functions", "raise", "words")
NOT_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
COMMANDS = {
    "grasp build": ("build", "--config", "settings.yaml", "--out", "made", "--untrained"),
    "grasp select --export": ("select", "art", "--budget", "30%", "--out", "kept.parquet", "--export", "kept"),
    "grasp predict --by": ("predict", "art", "--by", "topic"),
    "grasp score": ("score", "art", "--top", "5"),
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FORWARD_PASS = "models.forward_pass:extract"  # the first row meets the model here
Numbers = dict[str, dict[str, float]]  # by section of the limits, and name


# -------------------------------------------------------------------------------------------------------------- sources


def is_text(node: ast.AST) -> TypeGuard[ast.Constant]:
    """Return whether a node is a string."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def size_of(text: str) -> Counter[str]:
    """Return the number of lines, lines of code, functions, `raise` and words of a module."""
    nodes = list(ast.walk(ast.parse(text)))
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in nodes:
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            code.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    functions = sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in nodes)
    documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = [node.value for node in nodes if is_text(node) and id(node) not in documentation]
    words = [len(re.findall("[A-Za-z]{2,}", value)) for value in texts if " " in value.strip()]
    raises = sum(isinstance(node, ast.Raise) for node in nodes)
    counts = (text.count("\n"), len(code), functions, raises, sum(n for n in words if n > 1))
    return Counter(dict(zip(COLUMNS, counts, strict=True)))


def sizes_by_package(source: Path = SOURCE) -> dict[str, Counter[str]]:
    """Return the size of each package."""
    sizes: dict[str, Counter[str]] = {}
    for path in sorted(source.rglob("*.py")):
        package, *rest = path.relative_to(source).parts
        sizes.setdefault(package if rest else TOP, Counter()).update(size_of(path.read_text(encoding="utf-8")))
    return sizes


def count_options() -> int:
    """Return the number of options of all commands, without `--help`."""
    waiting, count = [typer.main.get_command(grasp.cli.app)], 0
    while waiting:
        command = waiting.pop()
        waiting += getattr(command, "commands", {}).values()
        count += sum(parameter.param_type_name == "option" for parameter in command.params)
    return count


def totals(sizes: Mapping[str, Counter[str]]) -> Numbers:
    """Return the numbers that have a limit, without those of executed commands."""
    whole: Counter[str] = Counter()
    core: Counter[str] = Counter()
    for package, size in sizes.items():
        whole.update(size)
        if package not in OPTIONAL:
            core.update(size)
    per_1000 = round(1000 * core["raise"] / core["code"], 1)
    return {
        "whole": dict(whole),
        "core": {**core, "raise_per_1000": per_1000},
        "commands": {"options": count_options()},
    }


# --------------------------------------------------------------------------------------------------------------- limits


def above(numbers: Numbers, limits: Numbers) -> list[str]:
    """Return a line for each number that is above its limit, or has none."""
    return [
        f"{section}: {name}: {value:g}, limit {limits.get(section, {}).get(name)}"
        for section, values in numbers.items()
        for name, value in values.items()
        if value > limits.get(section, {}).get(name, -1)
    ]


def lowered(limits: Numbers, numbers: Numbers) -> Numbers:
    """Return the limits, each at most the number; a number without a limit becomes one."""
    sections = {**limits, **numbers}
    return {
        section: {
            name: min(limits.get(section, {}).get(name, value), numbers.get(section, {}).get(name, value))
            for name, value in {**limits.get(section, {}), **numbers.get(section, {})}.items()
        }
        for section in sections
    }


def write_limits(limits: Numbers, path: Path = LIMITS) -> None:
    """Write the limits as TOML."""
    lines = ["# Limits of the size of src/grasp: `python tools/size.py --update` lowers them."]
    for section, values in limits.items():
        lines += ["", f"[{section}]", *(f'"{name}" = {value:g}' for name, value in values.items())]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


# ---------------------------------------------------------------------------------------------------- executed commands


IMPORT = "import"  # stands for a module that is being imported


class CallTrace:
    """Functions that a command calls, as module:name, in the order of their first call."""

    def __init__(self) -> None:
        self.functions: dict[str, None] = {}
        self.depth = 0
        self._waiting = threading.local()

    def record(self, frame: FrameType, event: str, _: object) -> None:
        """Record a call or a return; see `sys.setprofile`."""
        stack: list[str | None] = self._waiting.__dict__.setdefault("stack", [])
        if event == "call":
            name = None if IMPORT in stack else _name(frame.f_code)
            stack.append(name)
            if name and name != IMPORT:
                self.functions.setdefault(name)
                self.depth = max(self.depth, len(list(filter(None, stack))))
        elif event == "return" and stack:
            stack.pop()

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Functions, modules, depth, changes of module."""
        modules = [name.partition(":")[0] for name in self.functions]
        changes = sum(module != other for module, other in pairwise(modules))
        return len(modules), len(set(modules)), self.depth, changes


def _name(code: CodeType) -> str | None:
    """What a frame counts as: a function, an import, or nothing of its own."""
    if code.co_name == "<module>":
        return IMPORT
    if not code.co_filename.startswith(PACKAGE) or code.co_name.startswith("<"):
        return None
    module = code.co_filename.removeprefix(PACKAGE).removesuffix(".py").removesuffix("/__init__")
    return f"{module.replace(os.sep, '.')}:{code.co_qualname}"


def make(place: Path) -> None:
    """Write a corpus, a model, a target, and an artifact of them."""
    from tests.pipeline.world import world  # noqa: PLC0415 - loads torch, which the fast part does not need

    write_yaml(world(place).model_dump(mode="json"), place / "settings.yaml")
    output = _run(place, ("build", "--config", "settings.yaml", "--out", "art", "--untrained"))
    if not (place / "art" / "manifest.json").exists():
        raise SystemExit(output)


def traced(place: Path, arguments: Sequence[str]) -> tuple[tuple[int, int, int, int], list[str]]:
    """Run a command in this process; return its counts and its functions in the order of their first call."""
    trace = CallTrace()
    _run(place, arguments, trace)
    return trace.counts, list(trace.functions)


def _run(place: Path, arguments: Sequence[str], trace: CallTrace | None = None) -> str:
    os.chdir(place)
    sys.argv = ["grasp", *arguments]
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        try:
            if trace is not None:
                threading.setprofile(trace.record)
                sys.setprofile(trace.record)
            grasp.cli.main()
        except SystemExit as stop:
            if stop.code:
                raise RuntimeError(output.getvalue()) from stop
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    return output.getvalue()


def trace_commands() -> dict[str, tuple[tuple[int, int, int, int], list[str]]]:
    """Execute every command on a small corpus, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder, get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        place = Path(folder)
        pool.apply(make, (place,))
        return {name: pool.apply(traced, (place, arguments)) for name, arguments in COMMANDS.items()}


def first_row(functions: Sequence[str]) -> int:
    """Return the position, from 1, of the function in which the first row meets the model."""
    return 1 + functions.index(FORWARD_PASS)


def main() -> None:
    """Count and print, and check or lower the limits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--roads", action="store_true", help="Also execute commands, and count their functions.")
    parser.add_argument("--names", action="store_true", help="Also print these functions.")
    parser.add_argument("--check", action="store_true", help="Exit with 1 if a number is above its limit.")
    parser.add_argument("--update", action="store_true", help="Lower the limits to the numbers.")
    args = parser.parse_args()
    sizes = sizes_by_package()
    numbers = totals(sizes)
    print(f"| package | {' | '.join(COLUMNS)} |\n|{'---|' * (1 + len(COLUMNS))}")
    for package, size in {**sizes, "whole": numbers["whole"], "core": numbers["core"]}.items():
        print(f"| {package} | {' | '.join(str(size[column]) for column in COLUMNS)} |")
    for name in ("raise", "words"):
        ratio = 1000 * numbers["core"][name] / numbers["core"]["code"]
        print(f"{name} per 1,000 lines of code of the core: {ratio:.1f}")
    print(f"options of all commands: {numbers['commands']['options']}")
    if args.roads or args.names:
        roads = trace_commands()
        position = first_row(roads["grasp build"][1])
        numbers["roads"] = {name: len(functions) for name, (_, functions) in roads.items()} | {"first row": position}
        print("| command | functions | modules | depth | changes of module |\n|---|---|---|---|---|")
        for name, (counts, _) in roads.items():
            print(f"| `{name}` | {' | '.join(map(str, counts))} |")
        print(f"first row of a build: function {position}")
        for name, (_, functions) in roads.items() if args.names else ():
            print(f"\n{name}")
            for module, of_module in groupby(functions, lambda function: function.partition(":")[0]):
                print(f"  {module}: {', '.join(function.partition(':')[2] for function in of_module)}")
    limits = tomllib.loads(LIMITS.read_text(encoding="utf-8")) if LIMITS.exists() else {}
    if args.update:
        write_limits(lowered(limits, numbers))
    elif args.check and (lines := above(numbers, limits)):
        raise SystemExit("\n".join([f"above the limits of {LIMITS.relative_to(ROOT)}:", *lines]))


if __name__ == "__main__":
    main()
