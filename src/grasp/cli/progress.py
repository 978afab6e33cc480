"""Progress on standard error: a bar on a terminal, plain lines elsewhere or with --quiet."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

LINE_SECONDS = 10.0


class Watch:
    """Shows the stages of a long run with rows/s, tokens/s and the time left."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True)
        self._plain = quiet or not sys.stderr.isatty()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._name = ""
        self._total: int | None = None
        self._rows = self._tokens = 0
        self._begun = self._told = time.monotonic()

    def __enter__(self) -> Self:
        if not self._plain:
            self._bar = Progress(
                TextColumn("{task.description:<16}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._close_stage()
        if self._bar is not None:
            self._bar.stop()

    def stage(self, name: str, *, rows: int | None, tokens: int | None) -> None:
        self._close_stage()
        self._name, self._total, self._rows, self._tokens = name, rows, 0, 0
        self._begun = self._told = time.monotonic()
        if self._bar is not None:
            self._task = self._bar.add_task(name, total=rows, rate="")

    def advance(self, rows: int, tokens: int) -> None:
        self._rows += rows
        self._tokens += tokens
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._rows, rate=self._rate())
        elif time.monotonic() - self._told >= LINE_SECONDS:
            self._told = time.monotonic()
            print(f"{self._name}: {self._so_far()}, {self._rate()}{self._left()}", file=sys.stderr)

    def _close_stage(self) -> None:
        if self._name and self._plain and self._rows:
            seconds = time.monotonic() - self._begun
            print(f"{self._name}: {self._rows:,} rows in {seconds:.1f} s, {self._rate()}", file=sys.stderr)
        self._name = ""

    def _so_far(self) -> str:
        return f"{self._rows:,} rows" if self._total is None else f"{self._rows:,} of {self._total:,} rows"

    def _rate(self) -> str:
        seconds = max(time.monotonic() - self._begun, 1e-9)
        rate = f"{self._rows / seconds:,.0f} rows/s"
        return f"{rate}, {self._tokens / seconds:,.0f} tokens/s" if self._tokens else rate

    def _left(self) -> str:
        if not self._total or not self._rows:
            return ""
        seconds = (time.monotonic() - self._begun) * (self._total - self._rows) / self._rows
        minutes, seconds = divmod(round(seconds), 60)
        return f", {minutes} min {seconds:02d} s left"
