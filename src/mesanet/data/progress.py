"""How far a piece of work is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Shows what is done of how much, the rate and the time left, on stderr."""

    def __init__(self, label: str, unit: str, *, quiet: bool = False) -> None:
        self._label, self._unit, self._quiet = label, unit, quiet
        self._bar: Any = None
        self._task: Any = None
        self._start = self._last_line = time.monotonic()
        self._first: tuple[int, int] | None = None

    def __enter__(self) -> Progress:
        if not self._quiet and sys.stderr.isatty():
            self._bar = _bar()
            self._task = self._bar.add_task(self._label, total=None, note="", rate="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, total: int | None, *, counted: int | None = None, note: str = "") -> None:
        """Tell how much is done of a total, if that is known; the rate is of `counted`, or else of `done`."""
        if self._quiet:
            return
        now, count = time.monotonic(), done if counted is None else counted
        if self._first is None:
            # What came before is no part of this rate: an earlier run may have done it.
            self._first, self._start = (done, count), now
        seconds = max(now - self._start, 1e-9)
        rate = _scaled((count - self._first[1]) / seconds) + f"{self._unit}/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, note=note, rate=rate)
        elif now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            parts = [*self._share(done, total, seconds), *([note] if note else []), rate]
            print(f"{self._label}: {', '.join(parts)}", file=sys.stderr, flush=True)

    def _share(self, done: int, total: int | None, seconds: float) -> list[str]:
        if not total or self._first is None or done <= self._first[0]:
            return []
        left = (total - done) * seconds / (done - self._first[0])
        return [f"{100 * done / total:.0f} %", f"{left:.0f} s left"]


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
        TextColumn("{task.fields[note]}"),
        TextColumn("{task.fields[rate]}"),
        console=Console(stderr=True),
    )
