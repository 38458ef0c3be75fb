"""Fair timing: what is compared runs in turns within one process, and every repeat is kept.

On a shared machine the same code may take twice as long a minute later. Running A, B, A, B, ... lets both meet the same
conditions, and the best of each is the closest to what it costs undisturbed.
"""

from __future__ import annotations

import gc
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mesanet.processor import processor


@dataclass(frozen=True, kw_only=True)
class Timing:
    """All repeats of one callable, in the order in which they ran."""

    name: str
    """What was measured."""
    seconds: tuple[float, ...]
    """Wall-clock time of each repeat."""

    @property
    def best(self) -> float:
        """The shortest repeat."""
        return min(self.seconds)


def time_interleaved(
    work: Mapping[str, Callable[[], object]],
    *,
    repeats: int,
    warm_up: int = 1,
    in_a_row: int = 1,
    budget: float = float("inf"),
    device: torch.device | str = "cpu",
) -> dict[str, Timing]:
    """Time the callables in turns, `repeats` rounds after `warm_up` rounds that do not count.

    A round is not begun if, going by the longest so far, it would end after `budget` seconds; but one that counts
    always runs. What a callable returns is freed before the next one starts, outside of the measured time.

    With `in_a_row` above one, each runs so many times when it is its turn, and all of them are kept: the first often
    pays for memory that has gone back to the system since its last turn, as it would not in a training loop.
    """
    assert repeats >= 1
    assert in_a_row >= 1
    started = time.perf_counter()
    seconds: dict[str, list[float]] = {name: [] for name in work}
    longest = 0.0
    for turn in range(-warm_up, repeats):
        elapsed = time.perf_counter() - started
        enough = turn >= 0 and all(seconds.values())
        if elapsed + longest > budget and enough:
            break
        if turn < 0 and elapsed + 2 * longest > budget:
            continue  # No time for another warm-up beside the round that counts.
        round_started = time.perf_counter()
        taken = _time_round(work, in_a_row, torch.device(device))
        if turn >= 0:
            for name, times in taken.items():
                seconds[name].extend(times)
        longest = max(longest, time.perf_counter() - round_started)
    return {name: Timing(name=name, seconds=tuple(values)) for name, values in seconds.items()}


def _time_round(
    work: Mapping[str, Callable[[], object]], in_a_row: int, device: torch.device
) -> dict[str, list[float]]:
    """Let each callable have its turn; the garbage collector runs before, so that it falls into nobody's turn."""
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    try:
        return {name: [_time_once(run, device) for _ in range(in_a_row)] for name, run in work.items()}
    finally:
        if collecting:
            gc.enable()


def _time_once(run: Callable[[], object], device: torch.device) -> float:
    _wait_for(device)
    start = time.perf_counter()
    result = run()
    _wait_for(device)
    taken = time.perf_counter() - start
    del result
    return taken


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def machine(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Describe what a measurement ran on: processor, threads, versions."""
    device = torch.device(device)
    described: dict[str, Any] = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": _meminfo("MemTotal"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device.type,
    }
    if device.type == "cuda":
        described["accelerator"] = torch.cuda.get_device_name(device)
        described["cuda"] = torch.version.cuda
    return described


def available_memory(device: torch.device | str = "cpu") -> int | None:
    """Bytes that can be allocated on the device now; None where the system does not tell."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return _meminfo("MemAvailable")


def _meminfo(entry: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == entry:
            return int(value.split()[0]) * 1024
    return None
