"""Ctrl-C and SIGTERM as a wish that the loop looks at between two steps."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

IMPATIENT = 1.0
"""Seconds after which another Ctrl-C is a second wish. One that comes earlier is the same one, by another way: the
terminal sends it to every process, and launchers send it on."""


class Stop:
    """Whether somebody has asked to stop."""

    asked = False


@contextmanager
def watch_signals() -> Iterator[Stop]:
    """Note SIGINT and SIGTERM instead of dying of them; a second Ctrl-C, a while after the first, ends at once.

    SIGTERM never does: schedulers and launchers repeat it, and who means it can send SIGKILL.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    first: float | None = None

    def note(number: int, frame: Any) -> None:
        nonlocal first
        stop.asked = True
        if number == signal.SIGINT:
            now = time.monotonic()
            first = now if first is None else first
            if now - first >= IMPATIENT:
                raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
