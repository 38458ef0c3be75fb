"""SIGKILL at any moment of a preparation: what is there is whole, and going on gives the same bytes."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.data.conftest import contents, make_texts, write_lines

psutil = pytest.importorskip("psutil")

KILLS = [pytest.param(4, id="quick"), pytest.param(20, id="many", marks=[pytest.mark.slow, pytest.mark.timeout(600)])]


def _command(source: Path, out: Path, shard_tokens: int) -> list[str]:
    options = [
        "--tokenizer",
        "bytes",
        "--shard-tokens",
        str(shard_tokens),
        "--validation-fraction",
        "0.2",
        "--workers",
        "2",
    ]
    return [sys.executable, "-m", "mesanet", "data", "prepare", str(source), "--out", str(out), *options]


def _records(out: Path) -> list[dict[str, object]]:
    """The records of finished groups; a file may vanish while looking, once the index is there."""
    found = []
    for path in sorted(out.glob("group-*.json")):
        try:
            found.append(json.loads(path.read_text()))
        except FileNotFoundError:
            continue
    return found


def _finished(out: Path) -> int:
    return sum(1 for _ in out.glob("group-*.json"))


def _check_whole(out: Path) -> None:
    """Every shard that is on record is there, and is what the record says."""
    if (out / "index.json").exists():
        return
    for record in _records(out):
        for shard in record["shards"].values():  # type: ignore[attr-defined]
            assert hashlib.sha256((out / shard["file"]).read_bytes()).hexdigest() == shard["sha256"]


def _check_same(whole: Path, out: Path) -> None:
    """The same files to the last byte, but for the note that a finished folder has been looked at again."""
    found = contents(out)
    found.pop("verified.json", None)
    assert found == contents(whole)


def _kill_at(process: subprocess.Popen[bytes], out: Path, groups: int, delay: float) -> None:
    """Kill once that many more groups are finished, and a moment later; its workers have to end by themselves."""
    wanted = _finished(out) + groups
    while process.poll() is None and _finished(out) < wanted:
        time.sleep(0.002)
    time.sleep(delay)
    try:
        workers = psutil.Process(process.pid).children()
    except psutil.NoSuchProcess:
        workers = []
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive


@pytest.mark.parametrize("kills", KILLS)
def test_kills_change_nothing(tmp_path: Path, kills: int) -> None:
    moments = random.Random(kills)
    source = write_lines(tmp_path / "texts.jsonl", make_texts(100 * kills, longest=200))
    subprocess.run(_command(source, tmp_path / "whole", 4000), check=True, capture_output=True)
    groups = sum(1 for path in (tmp_path / "whole").glob("train-*.tokens"))
    out = tmp_path / "killed"
    done = missed = 0
    while done < kills:
        process = subprocess.Popen(_command(source, out, 4000), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        _kill_at(process, out, moments.randint(0, max(2 * groups // kills, 1)), moments.uniform(0, 0.02))
        process.communicate()
        _check_whole(out)
        if process.returncode == -signal.SIGKILL:
            done += 1
        else:
            # It was done before its moment came, which is no kill: the next one begins anew.
            assert process.returncode == 0
            _check_same(tmp_path / "whole", out)
            shutil.rmtree(out)
            missed += 1
            assert missed < 3 * kills, "the moments are too late for this preparation"
    subprocess.run(_command(source, out, 4000), check=True, capture_output=True)
    _check_same(tmp_path / "whole", out)


def test_ctrl_c_keeps_what_is_finished(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "texts.jsonl", make_texts(600, longest=200))
    out = tmp_path / "out"
    process = subprocess.Popen(_command(source, out, 2000), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while process.poll() is None and _finished(out) < 2:
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    # It may have been done before the signal came.
    assert process.returncode in (0, 130), errors
    assert b"Traceback" not in errors
    _check_whole(out)
    if process.returncode == 130:
        assert len(_records(out)) >= 2
        assert not list(out.glob("*.partial"))
