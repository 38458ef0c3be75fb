"""How far a piece of work is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

SECONDS_BETWEEN_LINES = 10.0


class Display:
    """Shows on stderr how far something is; who it is for says in which words."""

    def __init__(self, label: str, *, quiet: bool = False) -> None:
        self._label, self._quiet = label, quiet
        self._bar: Any = None
        self._task: Any = None
        self._last_line: float | None = None

    def __enter__(self) -> Self:
        if not self._quiet and sys.stderr.isatty():
            self._bar = _bar()
            self._task = self._bar.add_task(self._label, total=None, words="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Show a line that stays."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def show(self, done: int, total: int | None, words: str, line: str, *, last: bool = False) -> None:
        """Move the bar and put the words behind it; without a terminal say the line, but not too often."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, words=words)
            return
        now = time.monotonic()
        if last or self._last_line is None or now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            self.say(line)


class Progress(Display):
    """Shows what is done of how much, the rate and the time left."""

    def __init__(self, label: str, unit: str, *, quiet: bool = False) -> None:
        super().__init__(label, quiet=quiet)
        self._unit = unit
        self._first: tuple[int, int] | None = None
        # What is over soon needs no line.
        self._start = self._last_line = time.monotonic()

    def update(self, done: int, total: int | None, *, counted: int | None = None, note: str = "") -> None:
        """Tell how much is done of a total, if that is known; the rate is of `counted`, or else of `done`."""
        now, count = time.monotonic(), done if counted is None else counted
        if self._first is None:
            # What came before is no part of this rate: an earlier run may have done it.
            self._first, self._start = (done, count), now
        seconds = max(now - self._start, 1e-9)
        rate = _scaled((count - self._first[1]) / seconds) + f"{self._unit}/s"
        told = [*([note] if note else []), rate]
        parts = [*self._share(done, total, seconds), *told]
        self.show(done, total, ", ".join(told), f"{self._label}: {', '.join(parts)}")

    def _share(self, done: int, total: int | None, seconds: float) -> list[str]:
        if not total or self._first is None or done <= self._first[0]:
            return []
        left = (total - done) * seconds / (done - self._first[0])
        return [f"{100 * done / total:.0f} %", f"{duration(left)} left"]


def duration(seconds: float) -> str:
    """A time in words that are short."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _scaled(value: float) -> str:
    return f"{value / 1e6:.2f} M " if value >= 1e6 else f"{value:,.0f} "


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[words]}"),
        console=Console(stderr=True),
    )
