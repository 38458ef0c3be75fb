"""How far a run is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Shows loss, learning rate, tokens per second and the time left, on stderr."""

    def __init__(self, first_step: int, steps: int, *, quiet: bool = False) -> None:
        self._first, self._steps = first_step, steps
        self._quiet = quiet
        self._bar: Any = None
        self._task: Any = None
        self._start = time.monotonic()
        self._last_line = -SECONDS_BETWEEN_LINES

    def __enter__(self) -> Progress:
        if not self._quiet and sys.stderr.isatty():
            self._bar = _bar()
            self._task = self._bar.add_task("training", total=self._steps, completed=self._first, numbers="")
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

    def update(self, step: int, loss: float, learning_rate: float, tokens_per_second: float) -> None:
        """Tell what came of an update."""
        if self._quiet:
            return
        numbers = f"loss {loss:.4f}, learning rate {learning_rate:.2e}, {tokens_per_second:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, numbers=numbers)
            return
        now = time.monotonic()
        if now - self._last_line >= SECONDS_BETWEEN_LINES or step == self._steps:
            self._last_line = now
            left = (now - self._start) / max(step - self._first, 1) * (self._steps - step)
            self.say(f"step {step}/{self._steps}: {numbers}, {duration(left)} left")


def duration(seconds: float) -> str:
    """A time in words that are short."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[numbers]}"),
        console=Console(stderr=True),
    )
