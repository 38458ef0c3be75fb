"""One lock for a folder, whatever order processes come and go in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mesanet.data.folder import Folder
from mesanet.errors import UserError
from mesanet.io import locked

fcntl = pytest.importorskip("fcntl")


def test_the_second_is_refused_until_the_first_is_done(tmp_path: Path) -> None:
    path = tmp_path / "new" / ".lock"
    with (
        locked(path, "busy here", remove=True),
        pytest.raises(UserError, match="busy here"),
        locked(path, "busy here"),
    ):
        pass
    assert not path.exists()
    with locked(path, "busy here"):
        pass
    assert path.exists()


def test_a_file_that_went_away_while_waiting_locks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first lock is on a file that its holder then removes: it takes another that all others can see."""
    path = tmp_path / ".lock"
    flock, removed = fcntl.flock, []

    def meanwhile(descriptor: int, how: int) -> None:
        if not removed:
            removed.append(os.fstat(descriptor).st_ino)
            path.unlink()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", meanwhile)
    with locked(path, "busy"):
        assert removed
        with pytest.raises(UserError, match="busy"), locked(path, "busy"):
            pass


def test_a_folder_is_prepared_by_one_process(tmp_path: Path) -> None:
    with Folder(tmp_path), pytest.raises(UserError, match="another process is preparing"), Folder(tmp_path):
        pass
    assert not list(tmp_path.iterdir())
