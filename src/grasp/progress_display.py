"""Show the progress of long operations, which they report by `grasp.progress.Progress`.

`Watch` shows a bar on standard error on a terminal, else plain lines, and nothing with `--quiet`. `NotebookWatch` shows
one line per stage in a notebook; functions for users of Python are decorated with `shows_progress`, which uses it.
"""

import functools
import inspect
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from grasp.progress import Progress, RetrainStatus
from grasp.text import duration_text, plain

P = ParamSpec("P")
R = TypeVar("R")

LINE_SECONDS = 5.0  # between two plain lines
NOTEBOOK_SECONDS = 0.5  # between two updates in a notebook
MIN_LATER_SECONDS = 5.0  # the total time left is printed if the later stages take at least this long
# Titles of the stages of a build; other stages are shown by name.
STAGE_TITLES = {
    "rows": "tokenizing",
    "model": "loading the model",
    "units": "reading the questions",
    "moments": "estimating moments",
    "rows scored": "scoring rows",
    "stored rows scored": "scoring rows",
}


class Watch(Progress):
    """Progress of the stages of a long run, with rows/s, tokens/s and the time left."""

    line_seconds = LINE_SECONDS
    quiet = False  # print nothing

    def __init__(self) -> None:
        self._console = Console(stderr=True, quiet=self.quiet)
        self._plain = self.quiet or not sys.stderr.isatty()
        self._stopped = threading.Event()
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._name = ""
        self._total: int | None = None
        self._rows = self._tokens = self._runs_done = self._runs_before = 0
        self._started_at = self._printed_at = time.monotonic()
        self._planned_tokens: dict[str, int] = {}  # tokens of the stages that have not started, by name, in order
        self._stage_tokens = 0  # tokens of the current stage if it was planned, else 0

    def __enter__(self) -> Self:
        if self._plain:
            threading.Thread(target=self._print_regularly, daemon=True).start()
            return self
        fields = MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeElapsedColumn()
        name, left = TextColumn("{task.description:<16}"), TextColumn("{task.fields[left]}")
        self._bar = Bar(name, BarColumn(), *fields, left, console=self._console)
        self._bar.start()
        return self

    def _print_regularly(self) -> None:
        """Print a line at regular intervals, even if a batch takes longer."""
        while not self._stopped.wait(1.0):
            if self._name and self._rows:
                self._report()
            elif self._name not in ("", "runs"):
                self._show(0, f"{duration_text(time.monotonic() - self._started_at)} so far", "", "")

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        if error_type is None:
            self._close_stage()
        if self._bar is not None:
            self._bar.stop()

    def stage(self, name: str, *, rows: int | None, tokens: int | None) -> None:
        """Begin a stage."""
        self._close_stage()
        self._stage_tokens = self._planned_tokens.get(name, 0)
        if name in self._planned_tokens:  # planned stages before it are skipped: they were already finished
            names = list(self._planned_tokens)
            later_names = names[names.index(name) + 1 :]
            self._planned_tokens = {later: self._planned_tokens[later] for later in later_names}
        name = STAGE_TITLES.get(name, name)
        self._name, self._total, self._rows, self._tokens, self._runs_done = name, rows, 0, 0, 0
        self._started_at = self._printed_at = time.monotonic()
        if self._bar is not None:
            self._task = self._bar.add_task(name, total=rows, rate="", left="")

    def advance(self, rows: int, tokens: int) -> None:
        """Count rows and tokens that were processed, and show them."""
        self._rows += rows
        self._tokens += tokens
        self._report()

    def _report(self) -> None:
        """Show rows, rate and the time left; changes no counts, since another thread calls it too."""
        seconds, total = time.monotonic() - self._started_at, self._total
        left = ""
        if total and self._rows:  # extrapolated from the throughput of this stage
            stage_seconds = seconds * total / self._rows
            left_seconds = stage_seconds * (1 - self._rows / total)
            later_tokens = sum(self._planned_tokens.values()) / self._stage_tokens if self._stage_tokens else 0.0
            later = stage_seconds * later_tokens
            left = f"{duration_text(left_seconds)} left"
            if later > MIN_LATER_SECONDS:
                left += f" in this stage, {duration_text(left_seconds + later)} in total"
        rows_text = f"{self._rows:,} rows" if total is None else f"{self._rows:,} of {total:,} rows"
        self._show(self._rows, rows_text, self._rate_text(seconds), left)

    def _show(self, completed: int, rows_text: str, rate: str, left: str) -> None:
        """Update the bar, or print a line if the last one is old enough."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=completed, rate=rate, left=left)
        elif time.monotonic() - self._printed_at >= self.line_seconds:
            self._printed_at = time.monotonic()
            self._print(rows_text, rate, left)

    def plan(self, tokens: Mapping[str, int]) -> None:
        """Announce the coming stages, in order, with the number of tokens that the model reads in each."""
        self._planned_tokens = dict(tokens)

    def note(self, line: str) -> None:
        """Print a note above the bar."""
        self._console.print(f"note: {plain(line)}", markup=False, emoji=False, highlight=False, soft_wrap=True)

    def runs(self, status: RetrainStatus) -> None:
        """Show the state of a retraining: finished runs, steps of the current runs, and the time left."""
        if status.note is not None:
            for line in status.note.splitlines():
                self.note(line)
            return
        if status.stage != self._name:
            self.stage(status.stage, rows=status.total or None, tokens=None)
            self._runs_before = status.done
        if status.stage != "runs":
            return
        self._runs_done = status.done - self._runs_before
        step = f"step {status.step:,} of {status.steps:,} of " if status.steps else ""
        current = f"{step}{status.running}" if status.running else ""
        left = "" if status.seconds_left is None else f"{duration_text(status.seconds_left)} left"
        self._show(status.done, f"{status.done:,} of {status.total:,} runs", current, left)

    __call__ = runs  # the callback of a retraining

    def _print(self, *parts: str) -> None:
        """Print a line on the current stage."""
        if not self.quiet:
            print(plain(f"{self._name}: {', '.join(filter(None, parts))}"), file=sys.stderr)

    def _close_stage(self) -> None:
        """Print the duration of the current stage, if lines are printed."""
        seconds = time.monotonic() - self._started_at
        if self._name and self._plain and self._rows:
            self._print(f"{self._rows:,} rows in {seconds:.1f} s", self._rate_text(seconds))
        if self._name and self._plain and self._runs_done:
            self._print(f"{self._runs_done:,} runs in {seconds:.1f} s")
        self._name = ""

    def _rate_text(self, seconds: float) -> str:
        seconds = max(seconds, 1e-9)
        rate = f"{self._rows / seconds:,.0f} rows/s"
        return f"{rate}, {self._tokens / seconds:,.0f} tokens/s" if self._tokens else rate


class NotebookWatch(Watch):
    """Progress in a cell of a notebook: one line per stage, which is updated in place."""

    line_seconds = NOTEBOOK_SECONDS

    def __init__(self) -> None:
        super().__init__()
        self._plain = True
        self._line: Any = None  # display handle of the current stage

    def stage(self, name: str, *, rows: int | None, tokens: int | None) -> None:
        super().stage(name, rows=rows, tokens=tokens)
        self._line = None
        self._print("...")

    def note(self, line: str) -> None:
        self._display(f"note: {plain(line)}")

    def _print(self, *parts: str) -> None:
        line = plain(f"{self._name}: {', '.join(filter(None, parts))}")
        if self._line is None:
            self._line = self._display(line)
        else:
            self._line.update({"text/plain": line}, raw=True)

    def _display(self, text: str) -> Any:
        display = import_module("IPython.display").display  # present in every notebook
        return display({"text/plain": text}, raw=True, display_id=True)


def shows_progress(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function: in a notebook, show its progress unless an argument `progress` is passed."""
    if "progress" not in inspect.signature(function).parameters:
        return function

    @functools.wraps(function)
    def with_progress(*args: P.args, **kwargs: P.kwargs) -> R:
        # in a kernel of Jupyter, Colab or an editor
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        if getattr(shell, "kernel", None) is None or kwargs.get("progress") is not None:
            return function(*args, **kwargs)
        with NotebookWatch() as watch:
            kwargs["progress"] = watch
            return function(*args, **kwargs)

    return with_progress
