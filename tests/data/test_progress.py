from __future__ import annotations

import pytest

from mesanet.data.progress import Progress


def test_the_rate_leaves_out_what_was_done_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with Progress("reading", "B", quiet=False) as progress:
        progress.update(600, 1000)
        assert capsys.readouterr().err == "", "what is over soon needs no line"
        now += 20
        progress.update(800, 1000, note="a note")
        assert capsys.readouterr().err == "reading: 80 %, 20 s left, a note, 10 B/s\n"
        now += 1
        progress.update(810, 1000)
        assert capsys.readouterr().err == ""


def test_what_ends_soon_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("reading", "B") as progress:
        progress.update(1, 1)
    assert capsys.readouterr() == ("", "")
