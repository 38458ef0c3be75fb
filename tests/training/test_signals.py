"""When a signal is a wish to stop after this step, and when it is one to stop now."""

from __future__ import annotations

import os
import signal

import pytest

from mesanet.training import signals
from mesanet.training.signals import watch_signals


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the time is, to be set by the test."""
    now = [100.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    return now


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    "numbers",
    [(signal.SIGTERM,) * 3, (signal.SIGINT,) * 3, (signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)],
)
def test_signals_at_about_one_time_are_one_wish(clock: list[float], numbers: tuple[int, ...]) -> None:
    """As they come to a whole job: once from outside, and once more from its launcher."""
    with watch_signals() as stop:
        assert not stop.asked
        for number in numbers:
            send(number)
            clock[0] += 0.3
        assert stop.asked


def test_a_second_ctrl_c_after_a_while_is_meant(clock: list[float]) -> None:
    before = signal.getsignal(signal.SIGINT)
    with watch_signals():
        send(signal.SIGINT)
        clock[0] += 1.0
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_sigterm_is_patient_for_ever(clock: list[float]) -> None:
    with watch_signals() as stop:
        for _ in range(5):
            send(signal.SIGTERM)
            clock[0] += 60.0
        assert stop.asked
