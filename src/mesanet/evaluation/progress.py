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

    def __enter__(self) -> Progress:
        if not self._quiet and sys.stderr.isatty():
            self._bar = _bar()
            self._task = self._bar.add_task(self._label, total=None, rate="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, total: int) -> None:
        """Tell how much is done."""
        if self._quiet:
            return
        now = time.monotonic()
        rate = done / max(now - self._start, 1e-9)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, rate=f"{rate:,.0f} {self._unit}/s")
        elif now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            left = (total - done) / max(rate, 1e-9)
            share = f"{100 * done / max(total, 1):.0f} %, {left:.0f} s left, {rate:,.0f} {self._unit}/s"
            print(f"{self._label}: {share}", file=sys.stderr, flush=True)


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[rate]}"),
        console=Console(stderr=True),
    )
