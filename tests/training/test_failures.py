"""Kills, damage, full disks, and numbers that are not finite."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.tiny import assert_same_weights, metrics, start, tiny_run

from mesanet.config.training import RunConfig
from mesanet.errors import UserError
from mesanet.model.files import read_weights
from mesanet.training.checkpoint import damage, list_checkpoints
from mesanet.training.diagnosis import NonFiniteError
from mesanet.training.run import train


def train_quietly(config: RunConfig, out: Path, resume: bool = False) -> None:
    train(config, out, resume=resume, quiet=True)


@pytest.fixture(scope="module")
def finished(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every interrupted run has to end with."""
    out = tmp_path_factory.mktemp("run") / "finished"
    train_quietly(tiny_run(tiny_data), out)
    return out


def wait_for(condition: Callable[[], bool], process: Any) -> None:
    """Wait until the condition is true, or the process has ended."""
    while not condition() and process.is_alive():
        time.sleep(0.0005)


def writing_a_checkpoint(run: Path) -> bool:
    return any((run / "checkpoints").glob(".step_*.partial"))


def lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_and_resume(config: RunConfig, run: Path, kills: int, seed: int) -> int:
    """Kill the run so many times, half of them while it writes a checkpoint; return how many hit it alive."""
    draw = random.Random(seed)
    hits = 0
    for number in range(kills):
        process = start(train_quietly, config, run, True)
        if number % 2:
            wait_for(lambda: writing_a_checkpoint(run), process)
            time.sleep(draw.uniform(0, 0.02))
        else:
            before, more = lines(run), draw.randrange(1, 6)
            wait_for(lambda before=before, more=more: lines(run) >= before + more, process)
            time.sleep(draw.uniform(0, 0.01))
        hits += process.is_alive()
        process.kill()
        process.join()
        for checkpoint in list_checkpoints(run / "checkpoints"):
            assert damage(checkpoint) is None, "a checkpoint is whole or absent, whenever the process dies"
    return hits


def check_kills(tiny_data: Path, tmp_path: Path, finished: Path, kills: int, **settings: Any) -> None:
    run = tmp_path / "run"
    hits = kill_and_resume(tiny_run(tiny_data, **settings), run, kills, seed=kills)
    assert hits > 0
    train_quietly(tiny_run(tiny_data, **settings), run, resume=True)
    assert_same_weights(run / "model", finished / "model")
    assert metrics(run) == metrics(finished)


def test_a_killed_run_ends_as_if_nothing_had_happened(tiny_data: Path, tmp_path: Path, finished: Path) -> None:
    check_kills(tiny_data, tmp_path, finished, kills=4, checkpoint_interval=2)


@pytest.mark.slow
def test_a_run_that_is_killed_twenty_times(tiny_data: Path, tmp_path: Path) -> None:
    settings = {"steps": 120, "checkpoint_interval": 3, "validation_interval": 10}
    train_quietly(tiny_run(tiny_data, **settings), tmp_path / "finished")
    check_kills(tiny_data, tmp_path, tmp_path / "finished", kills=20, **settings)


@pytest.mark.parametrize("name", ["model.safetensors", "state/__0_0.distcp", "checksums.json", "state/.metadata"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    tiny_data: Path, tmp_path: Path, finished: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    config, run = tiny_run(tiny_data, keep=3), tmp_path / "run"
    train_quietly(config, run)
    (run / "model").rename(tmp_path / "old")
    broken = run / "checkpoints" / "step_00000012" / name
    content = bytearray(broken.read_bytes())
    content[len(content) // 2] ^= 0x40
    broken.write_bytes(content)
    train(config, run, resume=True)
    told = capsys.readouterr().err
    assert "step_00000012 is damaged" in told
    assert "going back to step_00000008" in told
    assert_same_weights(run / "model", finished / "model")
    assert metrics(run) == metrics(finished)
    assert damage(run / "checkpoints" / "step_00000012") is None


def test_where_all_checkpoints_are_damaged_the_run_begins_anew(
    tiny_data: Path, tmp_path: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, run = tiny_run(tiny_data), tmp_path / "run"
    train_quietly(config, run)
    (run / "model").rename(tmp_path / "old")
    for checkpoint in list_checkpoints(run / "checkpoints"):
        (checkpoint / "model.safetensors").unlink()
    train(config, run, resume=True)
    assert "model.safetensors is missing); going back to the start" in capsys.readouterr().err
    assert_same_weights(run / "model", finished / "model")
    assert metrics(run) == metrics(finished)


def test_a_number_that_is_not_finite_stops_the_run(tiny_data: Path, tmp_path: Path) -> None:
    """A learning rate of 1e30 throws the weights out of float32's range within a few steps."""
    config = tiny_run(tiny_data, peak_learning_rate=1e30, start_learning_rate=1e-3, checkpoint_interval=1, keep=99)
    with pytest.raises(NonFiniteError, match=r"training stopped at step \d+: the .* is not finite") as stopped:
        train_quietly(config, tmp_path / "run")
    (dump,) = (tmp_path / "run").glob("dump_step_*")
    report = json.loads((dump / "report.json").read_text())
    assert report["tensor"] in str(stopped.value)
    assert f"step {report['step']}:" in str(stopped.value)
    assert read_weights(dump / "batch.safetensors")["tokens"].shape == (4, 32)
    assert read_weights(dump / "gradients.safetensors").keys() == read_weights(dump / "weights.safetensors").keys()
    for checkpoint in list_checkpoints(tmp_path / "run" / "checkpoints"):
        assert all(torch.isfinite(tensor).all() for tensor in read_weights(checkpoint / "model.safetensors").values())
    assert all(line["step"] < report["step"] for line in metrics(tmp_path / "run"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for three of the tiny run's checkpoints, but not for all."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("mounting a small disk is not permitted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_is_one_sentence_and_loses_nothing(tiny_data: Path, small_disk: Path, finished: Path) -> None:
    run = small_disk / "run"
    config = tiny_run(tiny_data, keep=20, checkpoint_interval=1)
    with pytest.raises(UserError, match=f"the disk is full at {run}; earlier checkpoints are whole: make room"):
        train_quietly(config, run)
    kept = list_checkpoints(run / "checkpoints")
    assert kept
    assert all(damage(checkpoint) is None for checkpoint in kept)
    assert not writing_a_checkpoint(run)
    assert not (run / "model").exists()
    subprocess.run(["mount", "-o", "remount,size=16m", small_disk], check=True)
    train_quietly(config, run, resume=True)
    assert_same_weights(run / "model", finished / "model")
    assert metrics(run) == metrics(finished)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_leaves_with_130_and_goes_on(
    tiny_data: Path, tmp_path: Path, finished: Path, repository: Path, number: int
) -> None:
    from mesanet.config.base import to_json

    (tmp_path / "run.json").write_text(to_json(tiny_run(tiny_data, steps=4000, validation_interval=0)))
    command = ["python", "-m", "mesanet", "train", "--config", "run.json", "--out", "run"]
    environment = {**os.environ, "PYTHONPATH": str(repository / "src"), "OMP_NUM_THREADS": "1"}
    import sys

    command[0] = sys.executable
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    while lines(tmp_path / "run") < 5:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, told = process.communicate()
    assert process.returncode == 130
    assert "which is saved; go on with --resume" in told
    assert len(list_checkpoints(tmp_path / "run" / "checkpoints")) >= 1
    again = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert again.stderr.count("\n") == 1
    assert "already holds this run" in again.stderr
