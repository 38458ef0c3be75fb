"""Files are written whole or not at all."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import BinaryIO

import pytest

from mesanet.errors import UserError
from mesanet.io import (
    check_shape,
    read_json,
    read_record,
    sync_folder,
    write_atomic,
    write_bytes_atomic,
    write_json_atomic,
    write_text_atomic,
)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "file.txt"
    path.parent.mkdir()
    path.write_text("old")
    return path


def names(target: Path) -> list[str]:
    return [entry.name for entry in target.parent.iterdir()]


def test_the_new_content_replaces_the_old(target: Path) -> None:
    assert write_text_atomic(target, "näw") == target
    assert target.read_text(encoding="utf-8") == "näw"
    write_bytes_atomic(str(target), b"\x00\xff")
    assert target.read_bytes() == b"\x00\xff"
    assert names(target) == ["file.txt"]


def test_missing_folders_are_created(tmp_path: Path) -> None:
    write_json_atomic(tmp_path / "a" / "b" / "c.json", {"x": [1, None]})
    assert read_json(tmp_path / "a" / "b" / "c.json") == {"x": [1, None]}


@pytest.mark.parametrize("failure", [OSError("disk full"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_failing_writer_leaves_the_old_file_and_nothing_else(target: Path, failure: BaseException) -> None:
    def write(file: BinaryIO) -> None:
        file.write(b"half of the n")
        file.flush()
        assert target.read_text() == "old"
        raise failure

    with pytest.raises(type(failure)):
        write_atomic(target, write)
    assert target.read_text() == "old"
    assert names(target) == ["file.txt"]


@pytest.mark.parametrize("value", [math.nan, [math.inf], {"x": -math.inf}, {"x": object()}])
def test_what_is_no_json_leaves_the_old_file(target: Path, value: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        write_json_atomic(target, value)
    assert target.read_text() == "old"
    assert names(target) == ["file.txt"]


def test_a_folder_in_the_way_is_an_error_and_stays(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(OSError, match="x"):
        write_text_atomic(tmp_path / "x", "text")
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_permissions_are_those_of_the_old_file_or_of_a_plain_new_one(target: Path) -> None:
    target.chmod(0o640)
    write_text_atomic(target, "new")
    assert target.stat().st_mode & 0o777 == 0o640
    (target.parent / "plain").touch()
    write_text_atomic(target.parent / "atomic", "new")
    assert (target.parent / "atomic").stat().st_mode == (target.parent / "plain").stat().st_mode


def test_a_link_stays_a_link(target: Path) -> None:
    link = target.parent / "link"
    link.symlink_to(target.name)
    write_text_atomic(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_content_is_on_the_disk_before_the_name_is(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is what survives a crash: file synced, renamed, then the folder synced."""
    events: list[str] = []
    real_sync, real_replace = os.fsync, os.replace

    def note_sync(descriptor: int) -> None:
        events.append("folder" if Path(f"/proc/self/fd/{descriptor}").is_dir() else "file")
        real_sync(descriptor)

    def note_replace(source: str, goal: str) -> None:
        events.append("rename")
        real_replace(source, goal)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    write_text_atomic(target, "new")
    assert events == ["file", "rename", "folder"]
    sync_folder(target.parent)


def test_broken_json_names_the_file(target: Path) -> None:
    target.write_text(json.dumps({"x": 1})[:-1])
    with pytest.raises(ValueError, match=r"file\.txt is not valid JSON"):
        read_json(target)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([], "it is a list instead of a table"),
        ({"name": "x", "sizes": []}, "it has no 'loss'"),
        ({"name": 1, "sizes": [], "loss": 1.0}, "name is a number"),
        ({"name": "x", "sizes": 3, "loss": 1.0}, "sizes is a number instead of a list"),
        ({"name": "x", "sizes": [{"count": 1}, {}], "loss": 1.0}, r"sizes\[1\] has no 'count'"),
        ({"name": "x", "sizes": [{"count": True}], "loss": 1.0}, r"sizes\[0\].count is true or false"),
        ({"name": "x", "sizes": [], "loss": "1.0"}, "loss is a text"),
    ],
)
def test_records_that_lack_something_are_refused_by_name(tmp_path: Path, value: object, problem: str) -> None:
    shape = {"name": str, "sizes": [{"count": int}], "loss": (None, float)}
    for whole in ({"name": "x", "sizes": [{"count": 1}], "loss": 1}, {"name": "", "sizes": [], "loss": None, "y": 2}):
        check_shape("somewhere", whole, shape)
    write_json_atomic(tmp_path / "record.json", value)
    with pytest.raises(UserError, match=rf"record\.json is damaged: {problem}"):
        read_record(tmp_path / "record.json", shape)


def test_what_is_no_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(UserError, match=r"x\.json is not valid JSON"):
        read_json(tmp_path / "x.json")
