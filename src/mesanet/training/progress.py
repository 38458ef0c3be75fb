"""How far a run is."""

from __future__ import annotations

import time

from mesanet.data.progress import Display, duration


class Progress(Display):
    """Shows step, loss, learning rate, tokens per second and the time left."""

    def __init__(self, first_step: int, steps: int, *, quiet: bool = False) -> None:
        super().__init__("training", quiet=quiet)
        self._first, self._steps = first_step, steps
        self._start = time.monotonic()

    def update(self, step: int, loss: float, learning_rate: float, tokens_per_second: float) -> None:
        """Tell what came of an update."""
        place = f"step {step}/{self._steps}"
        numbers = f"loss {loss:.4f}, learning rate {learning_rate:.2e}, {tokens_per_second:,.0f} tokens/s"
        left = (time.monotonic() - self._start) / max(step - self._first, 1) * (self._steps - step)
        line = f"{place}: {numbers}, {duration(left)} left"
        self.show(step, self._steps, f"{place}, {numbers}", line, last=step == self._steps)
