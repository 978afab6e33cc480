"""Print tables and results, and check the output files of a command. Start with `print_result`."""

import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TextIO

from grasp import files
from grasp.cli.app import flag_of
from grasp.progress_display import Watch
from grasp.text import plain, printable

if TYPE_CHECKING:
    from grasp.artifact.reader import ArtifactReader
    from grasp.results import Result
    from grasp.runs.evaluation import Evaluation

# How messages call an input, by argument: "report.html holds the runs". The default is e.g. "--protocol reads".
READ_PHRASES = {"runs": "holds the runs", "checkpoints": "is a checkpoint"}


class PlainStream:
    """Standard output that replaces control characters, so that names from a corpus cannot steer a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: object) -> int:
        if not isinstance(text, str):
            # text streams raise TypeError for bytes, and libraries rely on it to recognise them
            raise TypeError(f"got {type(text).__name__}, expected text")
        return self._stream.write(printable(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def program() -> str:
    """Return the shell command that runs this program: `grasp` if it is on the path, else the current program."""
    if shutil.which("grasp"):
        return "grasp"
    script = Path(sys.argv[0])
    return f"{shlex.quote(sys.executable)} -m grasp" if script.suffix == ".py" else shlex.quote(str(script))


def check_outputs(
    outputs: Mapping[str, Path | None],
    reads: Mapping[str, files.InputPaths] | None = None,
    *,
    artifact: "ArtifactReader | None" = None,
    params: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> None:
    """Call `grasp.files.check_outputs`, and print a note for every file that will be overwritten.

    Args:
        outputs: output files by option; None: the option was not given.
        reads: inputs by phrase, as in `grasp.files.check_outputs`.
        artifact: artifact that is read, together with the inputs of its build.
        params: arguments of the command's public function; their paths are inputs, except `cache`.
        options: further arguments of `grasp.files.check_outputs`.
    """
    if not any(outputs.values()):
        return
    inputs = dict(reads or {}) | ({} if artifact is None else artifact.protected_paths)
    for name, value in params.items():
        if name != "cache":
            values = value if isinstance(value, list) else [value]
            phrase = READ_PHRASES.get(name, f"{flag_of(name)} reads")
            inputs[phrase] = [item for item in values if isinstance(item, Path)]
    files.check_outputs(outputs, inputs, **options)
    for flag, path in outputs.items():
        if path is not None and flag.startswith("--") and path.is_file() and not Watch.quiet:
            print(f"note: {flag}: overwriting {plain(path)}", file=sys.stderr)


def print_result(result: "Result", out: Path | None = None, *, written: int | None = None) -> None:
    """Print a result; if `out` is given, write its table there too.

    Args:
        result: the result.
        out: file of its table.
        written: number of rows of `out`, if the table was already written.
    """
    print(result)
    if out is None:
        return
    if written is None:
        written = len(result)
        result.write(out)
    print(f"{out}: {written:,} rows")


def print_evaluation(result: "Evaluation", json_file: Path | None) -> None:
    """Print an evaluation, and write it as JSON to a file, or only JSON to the standard output."""
    if json_file in files.STANDARD_OUTPUTS:
        print(printable(result.to_json()), end="")
        return
    print(result)
    if json_file is not None:
        files.write_atomically(json_file, result.to_json().encode())
