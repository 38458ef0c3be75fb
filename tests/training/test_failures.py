"""Damage, full disks, signals, and numbers that are not finite."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.tiny import assert_same_weights, metrics, tiny_run

from mesanet.config.training import RunConfig
from mesanet.data.dataset import open_dataset
from mesanet.data.loader import Loader, make_batches
from mesanet.errors import UserError
from mesanet.model.backbone import LanguageModel
from mesanet.model.files import read_weights
from mesanet.training import loop
from mesanet.training.checkpoint import check_parts, choose, damage, list_checkpoints, step_of
from mesanet.training.diagnosis import NonFiniteError
from mesanet.training.distributed import Processes
from mesanet.training.loop import Trainer
from mesanet.training.run import train
from mesanet.training.validation import validation_batches


def train_quietly(config: RunConfig, out: Path, resume: bool = False) -> None:
    train(config, out, resume=resume, quiet=True)


@pytest.fixture(scope="module")
def finished(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every interrupted run has to end with."""
    out = tmp_path_factory.mktemp("run") / "finished"
    train_quietly(tiny_run(tiny_data), out)
    return out


def writing_a_checkpoint(run: Path) -> bool:
    return any((run / "checkpoints").glob(".step_*.partial"))


def lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


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


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "state/.metadata"])
def test_a_list_of_checksums_without_the_files_that_matter_is_damage(finished: Path, tmp_path: Path, name: str) -> None:
    checkpoint = shutil.copytree(finished / "checkpoints" / "step_00000012", tmp_path / "step_00000012")
    assert damage(checkpoint) is None
    listed = json.loads((checkpoint / "checksums.json").read_text())
    (checkpoint / "checksums.json").write_text(json.dumps({key: listed[key] for key in listed if key != name}))
    assert damage(checkpoint) == f"checksums.json does not list {name}"
    (checkpoint / "checksums.json").write_text("{}")
    assert damage(checkpoint) is not None


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_where_all_checkpoints_are_damaged_nothing_is_thrown_away(tiny_data: Path, tmp_path: Path) -> None:
    config, run = tiny_run(tiny_data), tmp_path / "run"
    train_quietly(config, run)
    (run / "model").rename(tmp_path / "old")
    for checkpoint in list_checkpoints(run / "checkpoints"):
        (checkpoint / "model.safetensors").unlink()
    before = snapshot(run)
    for _ in range(2):
        with pytest.raises(UserError, match=r"step_00000012 is damaged .*step_00000008 is damaged .*restore one"):
            train_quietly(config, run, resume=True)
        assert snapshot(run) == before


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES, errno.EMFILE], ids=os.strerror)
def test_a_checkpoint_that_cannot_be_read_just_now_is_not_damaged(
    tiny_data: Path, tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(run / "model")
    before = snapshot(run)

    def fail(path: Path) -> str:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr("mesanet.training.checkpoint.file_digest", fail)
    with pytest.raises(
        UserError, match=rf"step_00000012 could not be read .*{os.strerror(number)}.*nothing was changed"
    ):
        train_quietly(tiny_run(tiny_data), run, resume=True)
    assert snapshot(run) == before
    monkeypatch.undo()
    train_quietly(tiny_run(tiny_data), run, resume=True)
    assert_same_weights(run / "model", finished / "model")
    assert metrics(run) == metrics(finished)


def test_only_the_newest_damaged_checkpoints_are_kept(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for step in range(5):
        shutil.copytree(finished / "checkpoints" / "step_00000012", folder / f"step_{step:08}")
    for step in range(1, 5):
        (folder / f"step_{step:08}" / "model.safetensors").unlink()
    assert choose(folder)[0] == folder / "step_00000000"
    assert sorted(path.name for path in folder.iterdir()) == [
        ".step_00000003.damaged", ".step_00000004.damaged", "step_00000000",
    ]  # fmt: skip


def test_a_state_whose_parts_are_elsewhere_is_no_checkpoint(finished: Path, tmp_path: Path) -> None:
    """As where a process of another host has written its part to a disk of its own."""
    state = shutil.copytree(finished / "checkpoints" / "step_00000012" / "state", tmp_path / "state")
    check_parts(state)
    (state / "__0_0.distcp").unlink()
    with pytest.raises(UserError, match=r"lacks __0_0.distcp.*a disk that all hosts share"):
        check_parts(state)


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


def check_stopped(config: RunConfig, run: Path, message: str) -> dict[str, Any]:
    """The run ends with this message and nothing that is not finite in a checkpoint; return the dump's report."""
    with pytest.raises(NonFiniteError, match=message) as stopped:
        train_quietly(config, run)
    (dump,) = run.glob("dump_step_*")
    assert str(dump) in str(stopped.value)
    for checkpoint in list_checkpoints(run / "checkpoints"):
        assert all(torch.isfinite(tensor).all() for tensor in read_weights(checkpoint / "model.safetensors").values())
    assert not (run / "model").exists()
    report: dict[str, Any] = json.loads((dump / "report.json").read_text())
    assert report["tensor"] in str(stopped.value)
    assert read_weights(dump / "batch.safetensors")["tokens"].shape[-1] == 32
    return report


def test_numbers_that_a_rule_refuses_are_diagnosed_like_any_others(tiny_data: Path, tmp_path: Path) -> None:
    """The Mesa rule raises at an infinite ridge, and has no way to say in which layer of which run that was."""
    config = tiny_run(
        tiny_data, start_learning_rate=1e-3, peak_learning_rate=1e39, warmup_steps=1, checkpoint_interval=50,
        validation_interval=0,
    )  # fmt: skip
    check_stopped(config, tmp_path / "run", r"training stopped at step 3: the weight \S+ is not finite \(loss nan")


@pytest.mark.parametrize("validation_interval", [0, 1])
def test_weights_that_an_update_threw_out_of_range_are_never_saved(
    tiny_data: Path, tmp_path: Path, validation_interval: int
) -> None:
    """No float32 is as large as 1e39, and the loss of the step itself is finite: it was taken before the update."""
    config = tiny_run(
        tiny_data, start_learning_rate=1e-3, peak_learning_rate=1e39, warmup_steps=1, checkpoint_interval=1,
        validation_interval=validation_interval,
    )  # fmt: skip
    message = r"training stopped at step 2: the weight \S+ is not finite \(loss \d"
    report = check_stopped(config, tmp_path / "run", message)
    assert [step_of(checkpoint) for checkpoint in list_checkpoints(tmp_path / "run" / "checkpoints")] == [1]
    assert math.isfinite(float(report["loss"]))
    # And again, from the checkpoint before it.
    shutil.rmtree(next((tmp_path / "run").glob("dump_step_*")))
    with pytest.raises(NonFiniteError, match=message):
        train_quietly(config, tmp_path / "run", resume=True)


def test_an_average_of_the_optimiser_that_is_not_finite_is_never_saved(tiny_data: Path, tmp_path: Path) -> None:
    """Gradients that are finite, but whose squares are not, would freeze the weights for good."""
    config = tiny_run(tiny_data, steps=4, checkpoint_interval=1, validation_interval=0)
    dataset = open_dataset(tiny_data)
    trainer = Trainer(config, tmp_path, dataset, Processes(0, 1, torch.device("cpu")))
    trainer.update(next(Loader(make_batches(dataset, config.data), prefetch=0)))
    trainer._check_state()
    moments = trainer.optimiser.state[trainer.parameters[-1]]
    moments["exp_avg_sq"].view(-1)[0] = math.inf
    name = next(name for name, parameter in trainer.model.named_parameters() if parameter is trainer.parameters[-1])
    with pytest.raises(NonFiniteError, match=f"step 1: the average squared gradient of {name} is not finite"):
        trainer._check_state()


def test_a_validation_loss_that_is_not_finite_stops_the_run(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only in evaluation, where the training batches are no help: the dump holds the held-out text."""
    losses_of = LanguageModel.losses

    def broken(model: LanguageModel, *arguments: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
        mean, each, rest = losses_of(model, *arguments, **more)
        return mean, each if model.training else each * math.nan, rest

    monkeypatch.setattr(LanguageModel, "losses", broken)
    config = tiny_run(tiny_data, validation_interval=3, checkpoint_interval=2)
    report = check_stopped(config, tmp_path / "run", r"training stopped at step 3: the loss is not finite \(loss nan")
    assert report["loss"] == "nan"
    (batch,) = (read_weights(dump / "batch.safetensors") for dump in (tmp_path / "run").glob("dump_step_*"))
    assert torch.equal(batch["tokens"], first_validation_batch(config))


def test_a_norm_that_is_not_finite_though_every_gradient_is_stops_the_run(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float32 holds gradients of 1e25, but not their squares."""
    norm = loop.gradient_norm

    def enlarge_and_take_it(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.fill_(1e25)
        return norm(parameters)

    monkeypatch.setattr(loop, "gradient_norm", enlarge_and_take_it)
    message = r"step 1: the norm of the gradient is not finite \(loss \d"
    report = check_stopped(tiny_run(tiny_data), tmp_path / "run", message)
    assert math.isfinite(float(report["loss"]))


def first_validation_batch(config: RunConfig) -> torch.Tensor:
    batches = validation_batches(open_dataset(config.data.path), config, Processes(0, 1, torch.device("cpu")))
    return torch.from_numpy(next(batches).tokens)


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
    with pytest.raises(OSError, match="No space left on device") as stopped:
        train_quietly(config, run)
    assert stopped.value.errno == errno.ENOSPC
    assert Path(stopped.value.filename).is_relative_to(run)
    kept = list_checkpoints(run / "checkpoints")
    assert kept
    assert all(damage(checkpoint) is None for checkpoint in kept)
    assert not writing_a_checkpoint(run)
    assert not (run / "model").exists()
    subprocess.run(["mount", "-o", "remount,size=16m", small_disk], check=True)
    train_quietly(config, run, resume=True)
    assert_same_weights(run / "model", finished / "model")
    assert metrics(run) == metrics(finished)


def test_a_disk_that_is_full_from_the_start_can_be_gone_on_with(
    tiny_data: Path, small_disk: Path, finished: Path
) -> None:
    """There is room for some of the small files of the start, but not for all of them."""
    for pages in range(5):
        subprocess.run(["mount", "-o", "remount,size=1m", small_disk], check=True)
        run, filler = small_disk / "run", small_disk / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        os.truncate(filler, filler.stat().st_size - 4096 * pages)
        with pytest.raises(OSError, match="No space left on device"):
            train_quietly(tiny_run(tiny_data), run)
        subprocess.run(["mount", "-o", "remount,size=16m", small_disk], check=True)
        filler.unlink()
        train_quietly(tiny_run(tiny_data), run, resume=True)
        assert_same_weights(run / "model", finished / "model")
        assert metrics(run) == metrics(finished)
        shutil.rmtree(run)


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
