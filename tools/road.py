"""Count the functions and modules of `src/grasp` that each command executes on a small corpus.

    python tools/road.py            # prints the table of docs/road.md
    python tools/road.py --names    # also the functions, in the order of their first call

Calls in every thread are counted. Lambdas and comprehensions belong to their function; code that runs while a module is
imported is not counted. Depth is the maximum depth of the call stack. Changes of module: how often a reader changes the
file when reading the functions in the order of their first call.
"""

import argparse
import io
import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from itertools import groupby, pairwise
from multiprocessing import get_context
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # the tests' corpus, and this checkout, from any directory

import grasp.cli  # noqa: E402
from grasp.yaml_files import write_yaml  # noqa: E402
from tests.pipeline.world import world  # noqa: E402

PACKAGE = str(ROOT / "src" / "grasp") + os.sep
COMMANDS = {
    "grasp build": ("build", "--config", "settings.yaml", "--out", "made", "--untrained"),
    "grasp select --export": ("select", "art", "--budget", "30%", "--out", "kept.parquet", "--export", "kept"),
    "grasp predict --by": ("predict", "art", "--by", "topic"),
    "grasp score": ("score", "art", "--top", "5"),
    "grasp report": ("report", "art", "--by", "topic", "--out", "report.html"),
}


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
    """A corpus, a model, a target, and an artifact of them."""
    write_yaml(world(place).model_dump(mode="json"), place / "settings.yaml")
    output = _run(place, ("build", "--config", "settings.yaml", "--out", "art", "--untrained"))
    if not (place / "art" / "manifest.json").exists():
        raise SystemExit(output)


def traced(place: Path, arguments: Sequence[str]) -> tuple[tuple[int, int, int, int], list[str]]:
    """One command in this process: what it counts, and what it passes."""
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


def main() -> None:
    """Trace, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--names", action="store_true", help="Print what is passed, too.")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        place = Path(folder)
        pool.apply(make, (place,))
        roads = {name: pool.apply(traced, (place, arguments)) for name, arguments in COMMANDS.items()}
    print("| command | functions | modules | depth | changes of module |\n|---|---|---|---|---|")
    for name, (counts, _) in roads.items():
        print(f"| `{name}` | {' | '.join(map(str, counts))} |")
    if args.names:
        for name, (_, functions) in roads.items():
            print(f"\n{name}")
            for module, of_module in groupby(functions, lambda function: function.partition(":")[0]):
                print(f"  {module}: {', '.join(function.partition(':')[2] for function in of_module)}")


if __name__ == "__main__":
    main()
