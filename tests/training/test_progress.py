from __future__ import annotations

import pytest

from mesanet.data.progress import duration
from mesanet.training.progress import Progress


def test_without_a_terminal_there_are_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(0, 2) as progress:
        progress.update(1, 5.25, 1e-3, 12_345.6)
        progress.update(2, 5.0, 2e-3, 12_345.6)
    shown = capsys.readouterr()
    first, second = shown.err.splitlines()
    assert first.startswith("step 1/2: loss 5.2500, learning rate 1.00e-03, 12,346 tokens/s, ")
    assert second == "step 2/2: loss 5.0000, learning rate 2.00e-03, 12,346 tokens/s, 0 s left"
    assert shown.out == ""


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(0, 1, quiet=True) as progress:
        progress.update(1, 5.0, 1e-3, 1.0)
        progress.say("words")
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Progress(0, 2) as progress:
        progress.update(1, 5.25, 1e-3, 12_345.6)
        progress.say("[a line] that stays")
    shown = capsys.readouterr().err
    assert "[a line] that stays" in shown
    assert "training" in shown


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2, "0 s"), (59.6, "1 min 00 s"), (61, "1 min 01 s"), (3 * 3600 + 125, "3 h 02 min")]
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words
