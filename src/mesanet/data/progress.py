"""How far a preparation is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Shows bytes read, tokens, tokens per second and the time left, on stderr."""

    def __init__(self, total: int | None, *, quiet: bool = False) -> None:
        self._total = total
        self._quiet = quiet
        self._bar: Any = None
        self._task: Any = None
        self._start = self._last_line = time.monotonic()
        self._first: tuple[int, int] | None = None

    def __enter__(self) -> Progress:
        if not self._quiet and sys.stderr.isatty():
            self._bar = _bar(known=self._total is not None)
            self._task = self._bar.add_task("preparing", total=self._total, tokens="", rate="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, read: int, documents: int, tokens: int) -> None:
        """Tell how many bytes of the sources are done, and how many documents and tokens are kept."""
        if self._quiet:
            return
        now = time.monotonic()
        if self._first is None:
            # What an earlier run did is no part of this one's rate.
            self._first, self._start = (read, tokens), now
        seconds = max(now - self._start, 1e-9)
        rate = (tokens - self._first[1]) / seconds
        counts = f"{documents:,} documents, {tokens:,} tokens"
        if self._bar is not None:
            self._bar.update(self._task, completed=read, tokens=counts, rate=f"{rate / 1e6:.2f} M tokens/s")
        elif now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            print(f"{self._share(read, seconds)}{counts}, {rate / 1e6:.2f} M tokens/s", file=sys.stderr, flush=True)

    def _share(self, read: int, seconds: float) -> str:
        if not self._total or self._first is None or read <= self._first[0]:
            return ""
        left = (self._total - read) * seconds / (read - self._first[0])
        return f"{100 * read / self._total:.1f} %, {left:.0f} s left: "


def _bar(*, known: bool) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    columns = [TaskProgressColumn(), TimeRemainingColumn()] if known else [TimeElapsedColumn()]
    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        TextColumn("{task.fields[tokens]}"),
        TextColumn("{task.fields[rate]}"),
        console=Console(stderr=True),
    )
