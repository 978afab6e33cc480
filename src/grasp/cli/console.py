"""Tables and results on the terminal."""

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console

from grasp import files
from grasp.cli.app import flag_of
from grasp.text import WIDTH, plain, printable, text_table

if TYPE_CHECKING:
    from grasp.artifact.reader import ArtifactReader
    from grasp.results import Result

READS = {"runs": "holds the runs", "checkpoints": "is a checkpoint"}  # of what else is read: "--protocol reads"


class PlainStream:
    """Standard output through which nothing passes that steers a terminal, whatever a file, label or name holds."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: object) -> int:
        if not isinstance(text, str):
            raise TypeError(f"got {type(text).__name__}, expected text")  # as text streams do; libraries ask by trying
        return self._stream.write(printable(text))

    def styled(self, text: str) -> int:
        """Write text whose control characters are our own: what is untrusted in it was made printable before."""
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def in_colour() -> bool:
    """Whether standard output is a terminal with colours, and NO_COLOR is not set."""
    console = Console()
    return console.color_system is not None and not console.no_color


def show(title: str, headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table, as wide as the terminal is."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
    print(text_table(title, headings, rows, width=width))


def program() -> str:
    """How this program is called from here: `grasp` where the shell finds it, else as it was called now."""
    if shutil.which("grasp"):
        return "grasp"
    called = Path(sys.argv[0])
    return f"{shlex.quote(sys.executable)} -m grasp" if called.suffix == ".py" else shlex.quote(str(called))


def check_outputs(
    outputs: Mapping[str, Path | None],
    reads: Mapping[str, files.Reads] | None = None,
    *,
    artifact: "ArtifactReader | None" = None,
    asked: Mapping[str, Any] = MappingProxyType({}),
    **how: Any,
) -> None:
    """Check by `grasp.files.check_outputs`, and print a note for each file that will be replaced.

    Args:
        artifact: that is read, with what it was built from.
        asked: arguments of the command's verb; their paths are read.
    """
    if not any(outputs.values()):
        return
    read = dict(reads or {}) | ({} if artifact is None else artifact.reads)
    for name, value in asked.items():
        if name != "cache":
            paths = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, Path)]
            read[READS.get(name, f"{flag_of(name)} reads")] = paths
    files.check_outputs(outputs, read, **how)
    for flag, path in outputs.items():
        if path is not None and flag.startswith("--") and path.is_file():
            print(f"note: {flag} replaces {plain(path)}", file=sys.stderr)


def tell(result: "Result", out: Path | None = None, *, written: int | None = None) -> None:
    """Print a result, or write its table to `out` and print the rest.

    Args:
        written: so many lines are in `out` already.
    """
    if out is None:
        print(result)
        return
    for line in (result.headline, *result.notes):
        if line:
            print(plain(line))
    if written is None:
        written = len(result)
        result.write(out)
    print(f"{out}: {written:,} rows")
