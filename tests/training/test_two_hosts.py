"""Two hosts, each with a network of its own, train through torchrun's rendezvous, and one of them dies."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.training.tiny import losses, metrics, tiny_run

from mesanet.config.base import to_json
from mesanet.training.run import train

# Namespaces belong to the whole system, where this test may run several times at once.
HOSTS = {f"mesanet-{os.getpid()}-a": "10.213.77.1", f"mesanet-{os.getpid()}-b": "10.213.77.2"}
FIRST, SECOND = HOSTS


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


@pytest.fixture
def two_hosts() -> Iterator[None]:
    """Two network namespaces with a cable between them."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip, of the package iproute2")
    for name in HOSTS:
        made = ip("netns", "add", name)
        if made.returncode:
            pytest.skip(f"network namespaces are not permitted here: {made.stderr.strip()}")
    made = ip("link", "add", "cable-a", "netns", FIRST, "type", "veth", "peer", "name", "cable-b", "netns", SECOND)
    if made.returncode:
        pytest.skip(f"no cable between namespaces: {made.stderr.strip()}")
    for name, address in HOSTS.items():
        cable = f"cable-{name[-1]}"
        assert ip("-n", name, "addr", "add", f"{address}/24", "dev", cable).returncode == 0
        assert ip("-n", name, "link", "set", cable, "up").returncode == 0
        assert ip("-n", name, "link", "set", "lo", "up").returncode == 0
    yield
    for name in HOSTS:
        ip("netns", "del", name)


def launch(host: str, folder: Path, repository: Path) -> subprocess.Popen[bytes]:
    """The command that a person would give on this host."""
    launcher = [
        *("ip", "netns", "exec", host, sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3"),
        *("--rdzv-backend", "c10d", "--rdzv-id", "two-hosts", "--rdzv-endpoint", f"{HOSTS[FIRST]}:29400"),
        *("--rdzv-conf", f"is_host={int(host == FIRST)},last_call_timeout=5", "--local-addr", HOSTS[host]),
    ]
    command = ["-m", "mesanet", "train", "--config", "run.json", "--out", "run", "--resume"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(repository / "src"),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": f"cable-{host[-1]}",
    }
    with (folder / f"{host}.log").open("wb") as log:
        return subprocess.Popen([*launcher, *command], cwd=folder, env=environment, stdout=log, stderr=log)


def kill_host(host: str) -> None:
    """Kill every process of a host: torchrun, and the workers in sessions of their own."""
    for process in map(int, ip("netns", "pids", host).stdout.split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.usefixtures("two_hosts")
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_hosts_train_and_one_goes_on_when_the_other_dies(
    tiny_data: Path, tmp_path: Path, repository: Path, parallel: str
) -> None:
    settings = {"steps": 400, "warmup_steps": 10, "peak_learning_rate": 1e-3, "checkpoint_interval": 20}
    train(tiny_run(tiny_data, **settings), tmp_path / "alone", quiet=True)
    (tmp_path / "run.json").write_text(to_json(tiny_run(tiny_data, parallel=parallel, **settings)))
    hosts = {host: launch(host, tmp_path, repository) for host in HOSTS}
    try:
        while not (tmp_path / "run" / "checkpoints" / "step_00000040").exists():
            told = "\n".join((tmp_path / f"{host}.log").read_text() for host in HOSTS)
            assert all(process.poll() is None for process in hosts.values()), told
            time.sleep(0.02)
        told = "\n".join((tmp_path / f"{host}.log").read_text() for host in HOSTS)
        assert "400 steps, 51,200 tokens, on 2 x cpu" in told
        kill_host(SECOND)
        hosts[SECOND].wait()
        hosts[FIRST].wait(timeout=200)
    finally:
        for host, process in hosts.items():
            kill_host(host)
            process.wait()
    told = (tmp_path / f"{FIRST}.log").read_text()
    assert hosts[FIRST].returncode == 0, told
    # The last checkpoint before the kill, which came at the second one at the earliest.
    (step,) = map(int, re.findall(r"going on at step (\d+) of 400", told))
    assert step >= 40
    assert step % 20 == 0
    assert [line["step"] for line in metrics(tmp_path / "run") if line["kind"] == "train"] == list(range(1, 401))
    # Float32's other sums grow apart over more steps than these.
    assert losses(tmp_path / "run")[:50] == pytest.approx(losses(tmp_path / "alone")[:50], abs=1e-5)
    assert (tmp_path / "run" / "model").is_dir()
