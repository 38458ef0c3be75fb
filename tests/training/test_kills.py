"""Whenever a run is killed, the next one goes on, and ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.training.tiny import assert_same_weights, metrics, start, tiny_run

from mesanet.config.data import PrepareConfig
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
        check_finished(run, folder / "finished")
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


def kill_and_resume(
    config: RunConfig, folder: Path, kills: int, longest: float, preparing: int = 0
) -> tuple[Path, list[float]]:
    """Kill a run so many times, each time at a moment drawn from its first `longest` seconds, start-up included.

    The first `preparing` kills have to fall into the preparation of the data. A run that is done, or prepared, before
    its moment has come does not count: the next one begins anew. One that is done has to be as `folder / "finished"`.
    Returns the last run and all moments that counted.
    """
    draw = random.Random(kills)
    run, moments, missed = folder / "0", list[float](), 0
    while len(moments) < kills:
        prepares = len(moments) < preparing
        moment = draw.uniform(0, longest / 4 if prepares else longest)
        process = start(train_quietly, config, run)
        process.join(moment)
        process.kill()
        process.join()
        check_whole(run)
        if process.exitcode == 0 or (prepares and is_prepared(config)):
            if process.exitcode == 0:
                check_finished(run, folder / "finished")
            missed += 1
            assert missed < 3 * kills, "the moments are too late for this run"
            run = folder / str(missed)
            if prepares:
                shutil.rmtree(config.data.path)
        else:
            assert process.exitcode == -signal.SIGKILL, "it was alive"
            moments.append(moment)
    return run, moments


def check_finished(run: Path, reference: Path) -> None:
    """As if nothing had happened."""
    assert_same_weights(run / "model", reference / "model")
    assert metrics(run) == metrics(reference)


def is_prepared(config: RunConfig) -> bool:
    return (config.data.path / "index.json").exists()


def run_to_the_end(config: RunConfig, out: Path) -> float:
    """Train in a process of its own, as those that are killed, and return how long that took."""
    # The first process of all has to wait until the modules are imported.
    start(check_whole, out).join()
    begin = time.monotonic()
    process = start(train_quietly, config, out)
    process.join()
    assert process.exitcode == 0
    return time.monotonic() - begin


def test_a_run_that_is_killed_at_random_moments_ends_as_if_nothing_had_happened(
    tiny_data: Path, tmp_path: Path
) -> None:
    config = tiny_run(tiny_data, checkpoint_interval=2)
    took = run_to_the_end(config, tmp_path / "finished")
    run, _ = kill_and_resume(config, tmp_path, kills=4, longest=took)
    train_quietly(config, run)
    check_finished(run, tmp_path / "finished")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_kills_from_the_preparation_of_the_data_on_change_nothing(tmp_path: Path) -> None:
    """Eight of them while the data are prepared; all the others are spread over the run, several times its length."""
    source = tmp_path / "text.txt"
    words = random.Random(0).choices(["mesa", "layer", "solves", "the", "ridge", "regression", "again"], k=200_000)
    source.write_text("\n@@\n".join(" ".join(words[first : first + 50]) for first in range(0, len(words), 50)))

    def run_of(data: Path) -> RunConfig:
        config = tiny_run(data, steps=60, checkpoint_interval=3, validation_interval=10)
        prepare = PrepareConfig(
            sources=(str(source),), out=data, tokenizer="bytes", separator="\n@@\n", validation_fraction=0.2,
            shard_tokens=1 << 15, workers=0,
        )  # fmt: skip
        return replace(config, prepare=prepare)

    took = run_to_the_end(run_of(tmp_path / "data"), tmp_path / "finished")
    config = run_of(tmp_path / "killed")
    run, moments = kill_and_resume(config, tmp_path, kills=20, longest=took / 3, preparing=8)
    assert len(moments) == 20
    train_quietly(config, run)
    check_finished(run, tmp_path / "finished")
