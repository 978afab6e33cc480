"""Progress on standard error: a bar on a terminal, plain lines elsewhere or with --quiet."""

import sys
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from grasp.text import duration_text, plain

if TYPE_CHECKING:
    from grasp.retraining.worker import RetrainStatus

LINE_SECONDS = 5.0
WORTH_SAYING = 5.0  # seconds that the whole has beyond the stage
# What a build does, in words; other stages are called what they are.
STAGES = {
    "rows": "cutting into rows",
    "model": "loading the model",
    "units": "reading the questions",
    "moments": "reading a sample",
    "rows scored": "scoring rows",
    "kept rows scored": "scoring rows",
}


class Watch:
    """Shows the stages of a long run with rows/s, tokens/s and the time left."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True)
        self._plain = quiet or not sys.stderr.isatty()
        self._ended = threading.Event()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._name = ""
        self._total: int | None = None
        self._rows = self._tokens = self._runs = self._before = 0
        self._begun = self._told = time.monotonic()
        self._ahead: dict[str, int] = {}  # tokens of the stages that have not begun, by name
        self._here = 0  # tokens of this stage, where it was planned

    def __enter__(self) -> Self:
        if not self._plain:
            self._bar = Progress(
                TextColumn("{task.description:<16}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
                console=self._console,
            )
            self._bar.start()
        else:
            threading.Thread(target=self._beat, daemon=True).start()
        return self

    def _beat(self) -> None:
        """A sign of life in plain lines, however long one batch takes."""
        while not self._ended.wait(1.0):
            if self._name not in ("", "runs") and time.monotonic() - self._told >= LINE_SECONDS:
                self._told = time.monotonic()
                seconds = f"{duration_text(self._told - self._begun)} so far"
                self._tell(self._so_far() if self._rows else seconds, self._rate() if self._rows else "", self._left())

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if kind is None:
            self._close_stage()
        if self._bar is not None:
            self._bar.stop()

    def stage(self, name: str, *, rows: int | None, tokens: int | None) -> None:
        self._close_stage()
        self._here = self._ahead.get(name, 0)
        if name in self._ahead:  # what was planned before it is there already
            self._ahead = dict(list(self._ahead.items())[list(self._ahead).index(name) + 1 :])
        name = STAGES.get(name, name)
        self._name, self._total, self._rows, self._tokens, self._runs = name, rows, 0, 0, 0
        self._begun = self._told = time.monotonic()
        if self._bar is not None:
            self._task = self._bar.add_task(name, total=rows, rate="", left="")

    def advance(self, rows: int, tokens: int) -> None:
        self._rows += rows
        self._tokens += tokens
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._rows, rate=self._rate(), left=self._left())
        elif time.monotonic() - self._told >= LINE_SECONDS:
            self._told = time.monotonic()
            self._tell(self._so_far(), self._rate(), self._left())

    def plan(self, tokens: Mapping[str, int]) -> None:
        """The stages ahead, in order, with the tokens that the model reads in each."""
        self._ahead = dict(tokens)

    def note(self, line: str) -> None:
        """A sentence above the bar."""
        text = f"note: {plain(line)}"
        if self._bar is None:
            print(text, file=sys.stderr)
        else:
            self._bar.console.print(text, markup=False, highlight=False)

    def runs(self, status: "RetrainStatus") -> None:
        """Retraining: runs that are done, how far those under way are, and the time left for all of them."""
        if status.cost is not None:
            for line in status.cost.splitlines():
                self._console.print(f"note: {line}", markup=False, highlight=False, soft_wrap=True)
            return
        if status.stage != self._name:
            self.stage(status.stage, rows=status.total or None, tokens=None)
            self._before = status.done
        if status.stage != "runs":
            return
        self._runs = status.done - self._before
        step = f"step {status.step:,} of {status.steps:,} of " if status.steps else ""
        others = f" and {len(status.running) - 1} more" if len(status.running) > 1 else ""
        doing = f"{step}{status.running[0]}{others}" if status.running else ""
        left = "" if status.seconds_left is None else f"{duration_text(status.seconds_left)} left"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=status.done, rate=doing, left=left)
        elif time.monotonic() - self._told >= LINE_SECONDS:
            self._told = time.monotonic()
            self._tell(f"{status.done:,} of {status.total:,} runs", doing, left)

    def _tell(self, *parts: str) -> None:
        print(plain(f"{self._name}: {', '.join(part for part in parts if part)}"), file=sys.stderr)

    def _close_stage(self) -> None:
        seconds = time.monotonic() - self._begun
        if self._name and self._plain and self._rows:
            self._tell(f"{self._rows:,} rows in {seconds:.1f} s", self._rate())
        if self._name and self._plain and self._runs:
            self._tell(f"{self._runs:,} runs in {seconds:.1f} s")
        self._name = ""

    def _so_far(self) -> str:
        return f"{self._rows:,} rows" if self._total is None else f"{self._rows:,} of {self._total:,} rows"

    def _rate(self) -> str:
        seconds = max(time.monotonic() - self._begun, 1e-9)
        rate = f"{self._rows / seconds:,.0f} rows/s"
        return f"{rate}, {self._tokens / seconds:,.0f} tokens/s" if self._tokens else rate

    def _left(self) -> str:
        """Of the stage, by what of it is done; and in all, if the tokens ahead are read as fast as those here."""
        if not self._total or not self._rows:
            return ""
        whole_stage = (time.monotonic() - self._begun) * self._total / self._rows
        left = whole_stage * (1 - self._rows / self._total)
        ahead = whole_stage * sum(self._ahead.values()) / self._here if self._here else 0.0
        in_all = f" here, {duration_text(left + ahead)} in all" if ahead > WORTH_SAYING else ""
        return f"{duration_text(left)} left{in_all}"
