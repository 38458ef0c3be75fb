"""Whenever a run is killed, the next one goes on, and ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.training.tiny import assert_same_weights, metrics, start, tiny_run

from mesanet.config.training import RunConfig
from mesanet.training.checkpoint import damage, list_checkpoints
from mesanet.training.run import train


def train_quietly(config: RunConfig, out: Path) -> None:
    train(config, out, resume=True, quiet=True)


def train_and_die(config: RunConfig, out: Path, number: int, below: str) -> None:
    """Train, and die of SIGKILL just before the change of this number that is made to the files `below` the folder."""
    changes = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.truncate")
    watched, left = str(out), number

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        changing = event in changes or (event == "open" and isinstance(arguments[2], int) and arguments[2] & 3)
        if changing and str(arguments[0]).startswith(watched) and below in str(arguments[0]):
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    sys.addaudithook(look)
    train_quietly(config, out)


def check_every_change(config: RunConfig, folder: Path, below: str, most: int) -> int:
    """Kill a run before each of its first changes and resume it; return how many runs were killed."""
    train_quietly(config, folder / "finished")
    for number in range(most):
        run = folder / str(number)
        process = start(train_and_die, config, run, number, below)
        process.join()
        if process.exitcode == 0:
            return number
        assert process.exitcode == -signal.SIGKILL
        check_whole(run)
        train_quietly(config, run)
        assert_same_weights(run / "model", folder / "finished" / "model")
        assert metrics(run) == metrics(folder / "finished")
        assert sorted(path.name for path in run.iterdir()) == sorted(
            path.name for path in (folder / "finished").iterdir()
        ), "nothing is left of the run that was killed"
        shutil.rmtree(run)
    return most


def check_whole(run: Path) -> None:
    for checkpoint in list_checkpoints(run / "checkpoints"):
        assert damage(checkpoint) is None, "a checkpoint is whole or absent, whenever the process dies"


def short_run(data: Path) -> RunConfig:
    return tiny_run(data, steps=2, warmup_steps=0, validation_interval=0, checkpoint_interval=1, keep=1)


def test_a_run_that_is_killed_while_it_starts_can_be_resumed(tiny_data: Path, tmp_path: Path) -> None:
    """Before each of the first changes to an empty folder: the lock, the config, the facts, the checkpoints' folder."""
    assert check_every_change(short_run(tiny_data), tmp_path, below="", most=12) == 12


def test_a_run_that_is_killed_while_it_writes_the_model_can_be_resumed(tiny_data: Path, tmp_path: Path) -> None:
    """The hidden folder, its two files, and its new name."""
    assert check_every_change(short_run(tiny_data), tmp_path, below=".model.partial", most=20) == 4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_can_be_killed_before_every_change_it_makes(tiny_data: Path, tmp_path: Path) -> None:
    assert 40 < check_every_change(short_run(tiny_data), tmp_path, below="", most=1000) < 1000


def kill_and_resume(config: RunConfig, folder: Path, finished: Path, kills: int, longest: float) -> Path:
    """Kill a run so many times, each time at a moment drawn from its first `longest` seconds, start-up included.

    A run that is done before its moment has come does not count: it is checked, and the next one begins anew.
    """
    draw = random.Random(kills)
    run, hits, ends = folder / "0", 0, 0
    while hits < kills:
        process = start(train_quietly, config, run)
        time.sleep(draw.uniform(0, longest))
        process.kill()
        process.join()
        check_whole(run)
        if process.exitcode == 0:
            ends += 1
            assert ends < kills, "the moments are too late for this run"
            assert_same_weights(run / "model", finished / "model")
            run = folder / str(ends)
        else:
            assert process.exitcode == -signal.SIGKILL, "it was alive"
            hits += 1
    return run


@pytest.mark.parametrize(
    ("kills", "settings"),
    [
        (4, {"steps": 12, "checkpoint_interval": 2}),
        pytest.param(20, {"steps": 60, "checkpoint_interval": 3, "validation_interval": 10}, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_killed_at_random_moments_ends_as_if_nothing_had_happened(
    tiny_data: Path, tmp_path: Path, kills: int, settings: dict[str, int]
) -> None:
    config = tiny_run(tiny_data, **settings)
    begin = time.monotonic()
    process = start(train_quietly, config, tmp_path / "finished")
    process.join()
    took = time.monotonic() - begin
    # The kills are spread over two to three times what a run takes: over its start, its middle and its end.
    run = kill_and_resume(config, tmp_path, tmp_path / "finished", kills, longest=5 * took / kills)
    train_quietly(config, run)
    assert_same_weights(run / "model", tmp_path / "finished" / "model")
    assert metrics(run) == metrics(tmp_path / "finished")
