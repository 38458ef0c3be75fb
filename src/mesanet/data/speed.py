"""How fast text becomes token shards, beside the tokenizer alone on the same text in the same run."""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from mesanet import __version__
from mesanet.config.data import PrepareConfig
from mesanet.data.documents import Reading, read_documents
from mesanet.data.layout import TOKENIZER
from mesanet.data.preparation import prepare
from mesanet.data.sources import find_sources
from mesanet.data.tokenizer import load_tokenizer
from mesanet.data.tokenizer_training import TRAINED, tokenizer_of_sources
from mesanet.io import write_text_atomic
from mesanet.processor import processor

PEER_BYTES = 8 << 20
"""How much text the tokenizer alone reads."""


def measure_preparation(config: PrepareConfig, repeats: int, command: Sequence[str]) -> dict[str, Any]:
    """Prepare the same sources several times, each in a folder of its own that is removed again."""
    with tempfile.TemporaryDirectory() as folder:
        return _measure(_with_tokenizer(config, Path(folder)), repeats, command, config.tokenizer)


def _with_tokenizer(config: PrepareConfig, folder: Path) -> PrepareConfig:
    """The same with a tokenizer that is there: training one is no part of the speed."""
    if not config.tokenizer.startswith(TRAINED):
        return config
    definition = tokenizer_of_sources(config, quiet=True).definition()
    assert definition is not None
    return replace(config, tokenizer=str(write_text_atomic(folder / TOKENIZER, definition)))


def _measure(config: PrepareConfig, repeats: int, command: Sequence[str], tokenizer: str) -> dict[str, Any]:
    trials = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(dir=config.out.parent if config.out.parent.is_dir() else None) as folder:
            alone = _tokenizer_alone(config)
            before, started = os.times(), time.perf_counter()
            with _PeakMemory() as memory:
                index = prepare(replace(config, out=Path(folder) / "out"), quiet=True)
            seconds, after = time.perf_counter() - started, os.times()
        tokens = sum(split["tokens"] for split in index["splits"].values())
        trials.append(
            {
                "seconds": seconds,
                "processor_seconds": sum(after[:4]) - sum(before[:4]),
                "tokens_per_second": tokens / seconds,
                "tokenizer_alone_tokens_per_second": alone,
                "ratio_to_tokenizer_alone": tokens / seconds / alone,
                "peak_memory_bytes": memory.peak,
                "load_average": os.getloadavg()[0],
            }
        )
    return {
        "command": " ".join(command),
        "benchmark": "data prepare",
        "tokenizer": tokenizer,
        "tokens": tokens,
        "bytes": index["counts"]["bytes"],
        "documents": index["counts"]["documents"],
        "machine": _machine(),
        "mesanet": __version__,
        "best": max(trials, key=lambda trial: trial["tokens_per_second"]),
        "median_tokens_per_second": statistics.median(trial["tokens_per_second"] for trial in trials),
        "trials": trials,
    }


def describe_speed(record: dict[str, Any]) -> str:
    """The record in one line."""
    best = record["best"]
    memory = f", {best['peak_memory_bytes'] / 2**20:,.0f} MiB of memory" if best["peak_memory_bytes"] else ""
    return (
        f"{record['tokens']:,} tokens in {best['seconds']:.1f} s: {best['tokens_per_second'] / 1e6:.2f} M tokens/s, "
        f"{best['ratio_to_tokenizer_alone']:.2f} of the tokenizer alone in one process{memory}"
    )


def _tokenizer_alone(config: PrepareConfig) -> float:
    """Tokens per second of encoding alone, in this process, of the first text of each source in turn."""
    tokenizer, sources = load_tokenizer(config.tokenizer, config.bos_token), find_sources(config)
    reading = Reading(text_column=config.text_column, separator=config.separator)
    tokens, seconds = 0, 0.0
    for source in sources:
        size = 0
        for block in source.blocks(None):
            texts = list(read_documents(block, reading))
            started = time.perf_counter()
            tokens += sum(map(len, tokenizer.encode_batch(texts)))
            seconds += time.perf_counter() - started
            size += len(block.payload)
            if size >= PEER_BYTES // len(sources):
                break
    return tokens / max(seconds, 1e-9)


class _PeakMemory:
    """The most memory that this process and its children hold together, looked at every few milliseconds (Linux)."""

    def __init__(self) -> None:
        self.peak: int | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.05):
            processes = [os.getpid(), *_children(os.getpid())]
            held = sum(filter(None, map(_resident, processes)))
            if held:
                self.peak = max(self.peak or 0, held)


def _children(process: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{process}/task").iterdir())
        found = [int(word) for task in tasks for word in (task / "children").read_text().split()]
    except OSError:
        return []
    return found + [each for child in found for each in _children(child)]


def _resident(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _machine() -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": processor(),
        "cores": cores,
        "system": platform.platform(),
        "python": platform.python_version(),
    }
