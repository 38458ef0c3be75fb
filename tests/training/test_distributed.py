"""Several processes give the run of one, and their checkpoints are everyone's."""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from tests.training.tiny import assert_same_weights, losses, metrics, start, tiny_run

from mesanet.config.base import to_json
from mesanet.config.training import RunConfig, TrainingConfig
from mesanet.data.dataset import open_dataset
from mesanet.data.loader import make_batches
from mesanet.errors import UserError
from mesanet.model.backbone import LanguageModel
from mesanet.model.files import read_weights
from mesanet.training.diagnosis import NonFiniteError
from mesanet.training.distributed import Processes, connect, share_model
from mesanet.training.metrics import MetricsFile
from mesanet.training.run import train
from mesanet.training.told import is_told


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def train_all(*runs: tuple[RunConfig, Path, bool]) -> None:
    """Train one after the other in the same process group."""
    with connect(runs[0][0].training):
        for config, out, resume in runs:
            train(config, out, resume=resume, quiet=True)


def train_together(*runs: tuple[RunConfig, Path, bool]) -> None:
    """Train in two processes."""
    run_together(train_all, *runs)


def run_together(job: Callable[..., None], *arguments: Any, processes: int = 2) -> None:
    """Call `job` in processes that know each other as torchrun lets them."""
    shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [
        start(job, *arguments, environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(processes)
    ]
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0] * processes


def wide_run(data: Path, **settings: Any) -> RunConfig:
    """Two layers, so that fsdp has several groups of parameters to shard; a batch that is uneven over the parts."""
    return tiny_run(data, mixers=("mesa", "attention"), layers=2, **settings)


@pytest.fixture(scope="module")
def alone(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    train(wide_run(tiny_data, peak_learning_rate=1e-3), out, quiet=True)
    return out


def test_two_processes_give_the_curve_of_one_and_go_on_from_its_checkpoints(
    tiny_data: Path, tmp_path: Path, alone: Path
) -> None:
    def run(**settings: Any) -> RunConfig:
        return wide_run(tiny_data, peak_learning_rate=1e-3, **settings)

    # A run that one process has begun: its first two checkpoints, and nothing after them.
    begun = tmp_path / "begun"
    train(run(keep=3), begun, quiet=True)
    for later in (begun / "model", begun / "checkpoints" / "step_00000012"):
        later.rename(tmp_path / later.name)
    train_together(
        (run(parallel="ddp", accumulation=2), tmp_path / "ddp", False),
        (run(parallel="fsdp", activation_checkpointing=True), tmp_path / "fsdp", False),
        (run(parallel="fsdp", keep=3), begun, True),
    )
    # float32 rounds other sums differently: some 1e-7 of a loss of 6 in a step, which grows over the steps.
    for name in ("ddp", "fsdp", "begun"):
        out = tmp_path / name if name != "begun" else begun
        for kind in ("train", "validation"):
            assert losses(out, kind) == pytest.approx(losses(alone, kind), abs=1e-5), name
        assert [line["step"] for line in metrics(out)] == [line["step"] for line in metrics(alone)]
    # And one process goes on where two have stopped.
    for name in ("ddp", "fsdp"):
        (tmp_path / name / "model").rename(tmp_path / f"{name}-model")
        (tmp_path / name / "checkpoints" / "step_00000012").rename(tmp_path / f"{name}-12")
        train(run(), tmp_path / name, resume=True, quiet=True)
        assert losses(tmp_path / name) == pytest.approx(losses(alone), abs=1e-5)


def break_the_second_process(config: RunConfig, out: Path) -> None:
    """Train with a mixer that is given no numbers from its third call on, in this process alone, and refuses them."""
    from mesanet.mixers.mesa import Mesa

    mix, calls = Mesa.mix, 0

    def broken(mixer: Mesa, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gates: Any, *rest: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 2:
            gates = gates._replace(write=gates.write * math.nan)
        return mix(mixer, q, k, v, gates, *rest)

    if os.environ["RANK"] == "1":
        Mesa.mix = broken  # type: ignore[method-assign]
    try:
        train(config, out, quiet=True)
    except NonFiniteError as error:
        (out.parent / f"told-{os.environ['RANK']}").write_text(str(error))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_trouble_in_the_second_process_is_named_and_its_rows_are_dumped(
    tiny_data: Path, tmp_path: Path, parallel: str
) -> None:
    config = wide_run(tiny_data, parallel=parallel, accumulation=2, validation_interval=0)
    run_together(break_the_second_process, config, tmp_path / "run")
    # Two calls a step: the first update is sound, and the batch is that of the second.
    (report,) = (tmp_path / "run").glob("dump_step_00000002/report.json")
    assert "blocks.0" in json.loads(report.read_text())["tensor"]
    batch = read_weights(report.with_name("batch.safetensors"))
    tokens, targets = map(torch.from_numpy, make_batches(open_dataset(tiny_data), config.data).batch(1))
    assert torch.equal(batch["tokens"], tokens)
    assert torch.equal(batch["targets"], targets)
    told = [(tmp_path / f"told-{rank}").read_text() for rank in range(2)]
    assert told[0] == told[1]
    assert json.loads(report.read_text())["tensor"] in told[0]


def train_on_a_disk_of_its_own(config: RunConfig, folder: Path) -> None:
    """As on a host whose working directory no other one sees."""
    rank = os.environ["RANK"]
    (folder / rank).mkdir()
    os.chdir(folder / rank)
    with pytest.raises(UserError) as refused:
        train(config, "run", quiet=True)
    (folder / f"told-{rank}").write_text(str(refused.value))


def test_a_run_folder_that_is_not_shared_is_refused(tiny_data: Path, tmp_path: Path) -> None:
    """Each process would write its part of a checkpoint where no other one finds it."""
    run_together(train_on_a_disk_of_its_own, tiny_run(tiny_data, parallel="fsdp"), tmp_path)
    told = [(tmp_path / f"told-{rank}").read_text() for rank in range(2)]
    assert told[0] == told[1]
    assert f"run of process 0 on {platform.node()} is another folder for process 1 on {platform.node()}" in told[0]
    assert sorted(path.name for path in (tmp_path / "0" / "run").iterdir()) == [
        ".lock", "checkpoints", "config.json", "run.json",
    ]  # fmt: skip


def fail_to_write(data: Path, out: Path) -> None:
    """The first process alone meets a file that can't be written; note what both end with."""
    rank = os.environ["RANK"]
    config = tiny_run(data, parallel="ddp", checkpoint_interval=4, validation_interval=3)
    write, calls = MetricsFile.write, 0

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail_at_the_sixth(file: MetricsFile, record: dict[str, Any]) -> None:
        nonlocal calls
        calls += 1
        if calls == 6:
            fail()
        write(file, record)

    places = {
        "mesanet.training.run.copy_tokenizer": fail,
        "mesanet.training.records.truncate_metrics": fail,
        "mesanet.training.metrics.MetricsFile.write": fail_at_the_sixth,
        "mesanet.training.metrics.MetricsFile.sync": fail,
    }
    with connect(config.training):
        for number, (place, broken) in enumerate(places.items()):
            with pytest.MonkeyPatch.context() as patch:
                if rank == "0":
                    patch.setattr(place, broken)
                with pytest.raises(OSError, match="No space left") as caught:
                    train(config, out / str(number), quiet=True)
            (out / f"{rank}-{number}").write_text(f"{caught.value.filename} {rank == '0' or is_told(caught.value)}")


def test_what_the_first_process_cannot_write_ends_all_in_one_way(tiny_data: Path, tmp_path: Path) -> None:
    run_together(fail_to_write, tiny_data, tmp_path)
    for number in range(4):
        for rank in range(2):
            assert (tmp_path / f"{rank}-{number}").read_text() == f"{tmp_path / str(number)} True"
    # Steps 1, 2 and 3, a validation, step 4 and its checkpoint; no record of step 5, and nothing after it.
    assert [line["step"] for line in metrics(tmp_path / "2")] == [1, 2, 3, 3, 4]
    assert [path.name for path in (tmp_path / "2" / "checkpoints").iterdir()] == ["step_00000004"]


class AwkwardError(Exception):
    """An exception that can't be made again from its text, as those of many libraries."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)


def fail_in_the_first_process(out: Path) -> None:
    with connect(TrainingConfig(steps=1, parallel="ddp", device="cpu")) as processes:
        for number, error in enumerate((ZeroDivisionError("a bug"), OSError(28, "full", "x"), AwkwardError(3, "no"))):

            def make(error: Exception = error) -> None:
                raise error

            with pytest.raises(Exception, match=r"bug|full|no") as caught:
                processes.from_first(make)
            (out / f"{processes.rank}-{number}").write_text(f"{type(caught.value).__name__} {caught.value}")
        assert processes.collect(processes.rank) == [0, 1]
        assert processes.any(not processes.first)
        assert not processes.any(False)


def test_what_goes_wrong_in_the_first_process_is_raised_in_all(tmp_path: Path) -> None:
    """Whatever it is: a process that heard nothing would wait for ever."""
    run_together(fail_in_the_first_process, tmp_path)
    told = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert told["0-0"] == told["1-0"] == "ZeroDivisionError a bug"
    assert told["0-1"] == told["1-1"] == "OSError [Errno 28] full: 'x'"
    assert told["0-2"] == "AwkwardError no"
    assert told["1-2"] == "RuntimeError AwkwardError: no"


def leave_in_the_middle(config: RunConfig, out: Path) -> None:
    """Leave the group by an exception, and note whether the wrapped model was gone when the group ended."""
    wrapped: list[weakref.ref[torch.nn.Module]] = []
    destroy = dist.destroy_process_group

    def work(processes: Processes) -> None:
        module = share_model(LanguageModel(config.model), config.training, processes)
        wrapped.append(weakref.ref(module))
        try:
            raise ZeroDivisionError
        except ZeroDivisionError as error:
            raise KeyboardInterrupt from error

    def look(group: dist.ProcessGroup | None = None) -> None:
        (out / os.environ["RANK"]).write_text(str([module() for module in wrapped]))
        destroy(group)

    dist.destroy_process_group = look
    with pytest.raises(KeyboardInterrupt), connect(config.training) as processes:
        work(processes)


def test_the_wrapped_model_goes_before_the_group(tiny_data: Path, tmp_path: Path) -> None:
    """A ddp model that is the last to hold a group waits for its threads for ever, about every other time."""
    run_together(leave_in_the_middle, tiny_run(tiny_data, parallel="ddp"), tmp_path)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["[None]"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("mixers", [("mesa",), ("attention", "gated_deltanet")], ids="-".join)
def test_the_curves_agree_over_fifty_steps(
    tiny_data: Path, tmp_path: Path, parallel: str, mixers: tuple[str, ...]
) -> None:
    """In float64 at a high learning rate, where nothing but a mistake could differ, and in float32 at a usual one."""
    for dtype, rate, tolerance in (("float64", 1e-2, 1e-9), ("float32", 1e-3, 1e-5)):
        for name, settings in (("one", {}), ("two", {"parallel": parallel})):
            config = tiny_run(
                tiny_data, mixers=mixers, layers=2, steps=50, warmup_steps=10, peak_learning_rate=rate, **settings
            )
            config = replace(config, model=replace(config.model, dtype=dtype))
            out = tmp_path / f"{name}-{dtype}"
            if settings:
                train_together((config, out, False))
            else:
                train(config, out, quiet=True)
        for kind in ("train", "validation"):
            one, two = (losses(tmp_path / f"{name}-{dtype}", kind) for name in ("one", "two"))
            assert two == pytest.approx(one, abs=tolerance)


@pytest.mark.slow
def test_two_processes_resume_bit_for_bit(tiny_data: Path, tmp_path: Path) -> None:
    config = wide_run(tiny_data, parallel="fsdp", keep=3)
    train_together((config, tmp_path / "run", False))
    (tmp_path / "run" / "model").rename(tmp_path / "finished")
    (tmp_path / "run" / "checkpoints" / "step_00000012").rename(tmp_path / "last")
    before = metrics(tmp_path / "run")
    train_together((config, tmp_path / "run", True))
    assert_same_weights(tmp_path / "run" / "model", tmp_path / "finished")
    assert metrics(tmp_path / "run") == before


LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "mesanet"]
TRAIN = ["train", "--config", "run.json", "--out", "run"]


def source(repository: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(repository / "src"), "OMP_NUM_THREADS": "1"}


def torchrun(folder: Path, repository: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LAUNCHER, *TRAIN, *words],
        cwd=folder,
        env=source(repository),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_torchrun_runs_the_command_and_one_process_speaks(
    tiny_data: Path, tmp_path: Path, repository: Path, alone: Path, parallel: str
) -> None:
    config = wide_run(tiny_data, peak_learning_rate=1e-3)
    (tmp_path / "run.json").write_text(to_json(config))
    refused = torchrun(tmp_path, repository)
    assert refused.returncode != 0
    assert refused.stderr.count("mesanet: there are 2 processes: set training.parallel to ddp or fsdp") == 1
    done = torchrun(tmp_path, repository, "--training.parallel", parallel)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    assert "run/model: 12 steps" in done.stdout
    assert losses(tmp_path / "run") == pytest.approx(losses(alone), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_job_that_is_told_to_stop_saves_and_is_gone(
    tiny_data: Path, tmp_path: Path, repository: Path, parallel: str
) -> None:
    """SIGTERM to the launcher and to its workers, to which the launcher sends it on."""
    config = tiny_run(tiny_data, steps=100_000, validation_interval=0, checkpoint_interval=100_000, parallel=parallel)
    (tmp_path / "run.json").write_text(to_json(config))
    records = tmp_path / "run" / "metrics.jsonl"
    with (tmp_path / "log").open("wb") as log:
        launcher = psutil.Popen([*LAUNCHER, *TRAIN], cwd=tmp_path, env=source(repository), stdout=log, stderr=log)
    while not records.exists() or records.read_bytes().count(b"\n") < 5:
        assert launcher.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.02)
    workers = launcher.children()
    for process in (*workers, launcher):
        process.send_signal(signal.SIGTERM)
    # The launcher kills workers after 30 seconds.
    _, alive = psutil.wait_procs(workers, timeout=20)
    for process in alive:
        process.kill()
    launcher.wait()
    assert len(workers) == 2
    assert not alive
    told = (tmp_path / "log").read_text()
    (step,) = re.findall(r"stopped at step (\d+), which is saved; go on with --resume", told)
    assert told.count("mesanet: interrupted") == 1
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step_{int(step):08}"]
