"""A preparation that ends in its midst."""

from __future__ import annotations

import pytest

from mesanet.data.documents import tokenise


class StoppedError(Exception):
    """Stands for a kill at a place that the test chooses."""


def stop_after(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    """Let tokenising fail after some blocks, as for a process that ends there."""
    left = [blocks]

    def stopping(*arguments: object) -> object:
        left[0] -= 1
        if left[0] < 0:
            raise StoppedError
        return tokenise(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("mesanet.data.pool.tokenise", stopping)
