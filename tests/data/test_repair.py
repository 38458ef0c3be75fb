"""A damaged folder is made anew by the command that made it, wherever that is stopped."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tests.data.conftest import config, contents, write_lines
from tests.data.stopping import StoppedError, stop_after

from mesanet.config.data import PrepareConfig
from mesanet.data import open_dataset, prepare
from mesanet.errors import UserError


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_what_is_damaged_is_made_anew_by_the_same_command(
    tmp_path: Path, texts: list[str], tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if tokenizer != "bytes":
        pytest.importorskip("tokenizers")
    asked = config(
        write_lines(tmp_path / "texts.jsonl", texts), out=tmp_path / "out", tokenizer=tokenizer, shard_tokens=2000
    )
    prepare(asked, quiet=True)
    before = contents(asked.out)
    for name in before:
        if name == "index.json":
            continue
        for damaged in (b"", b"#" * len(before[name])):
            stamp = (asked.out / name).stat()
            (asked.out / name).write_bytes(damaged)
            # A disk that loses bits tells no time.
            os.utime(asked.out / name, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
            prepare(asked)
            assert f"{name} is damaged" in capsys.readouterr().err
            after = contents(asked.out)
            assert {name: after[name] for name in before} == before
        (asked.out / name).unlink()
        prepare(asked, quiet=True)
        assert open_dataset(asked.out, verify=True).fingerprint


def test_a_damaged_folder_that_holds_another_preparation_is_left_alone(
    tmp_path: Path, prepared: Path, texts: list[str]
) -> None:
    source = write_lines(tmp_path / "texts.jsonl", texts)
    shutil.copytree(prepared, tmp_path / "out")
    (tmp_path / "out" / "train.documents").unlink()
    before = contents(tmp_path / "out")
    with pytest.raises(UserError, match="holds another preparation"):
        prepare(config(source, out=tmp_path / "out", shard_tokens=5001), quiet=True)
    assert contents(tmp_path / "out") == before


def test_making_it_anew_goes_on_after_it_was_stopped(
    tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesanet.data.streams.BLOCK", 1000)
    asked = config(write_lines(tmp_path / "texts.jsonl", texts), out=tmp_path / "out", shard_tokens=2000)
    prepare(asked, quiet=True)
    before = contents(asked.out)
    (asked.out / "train-00000.tokens").write_bytes(b"")
    with monkeypatch.context() as patch:
        stop_after(patch, 12)
        with pytest.raises(StoppedError):
            prepare(asked, quiet=True)
    assert (asked.out / "group-00000.json").exists()
    prepare(asked, quiet=True)
    assert contents(asked.out) == before


def test_damage_after_a_kill_while_clearing_up_is_repaired(
    tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far the clearing up had come, and however far the repair comes at first."""
    monkeypatch.setattr("mesanet.data.streams.BLOCK", 1000)
    source = write_lines(tmp_path / "texts.jsonl", texts)
    prepare(config(source, out=tmp_path / "whole", shard_tokens=15_000), quiet=True)
    whole = contents(tmp_path / "whole")
    removals = 0
    while _is_stopped(
        monkeypatch, asked := config(source, out=tmp_path / str(removals), shard_tokens=15_000), removals
    ):
        (asked.out / "train-00000.tokens").write_bytes(b"")
        for more in (2, 0, 4):
            _is_stopped(monkeypatch, asked, more)
        prepare(asked, quiet=True)
        assert {**contents(asked.out), "verified.json": b""} == {**whole, "verified.json": b""}, removals
        removals += 1
    # Two groups of a table for each split and a record, and the plan.
    assert removals >= 7


def _is_stopped(monkeypatch: pytest.MonkeyPatch, asked: PrepareConfig, removals: int) -> bool:
    """Prepare, but end as by a kill, with nothing tidied up, after so many removals from a folder that is finished."""
    done, unlink = -1, Path.unlink

    def remove(path: Path, missing_ok: bool = False) -> None:
        nonlocal done
        # The lock of a process goes with it, however it ends.
        if path.name != ".lock" and (done >= 0 or (asked.out / "index.json").exists()):
            done += 1
            if done == removals:
                raise StoppedError
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", remove)
        patch.setattr("mesanet.data.folder.Folder.__exit__", lambda self, *_: self._lock.close())
        try:
            prepare(asked, quiet=True)
        except StoppedError:
            return True
    return False
