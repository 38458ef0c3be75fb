"""A run that takes less than a second, and processes that are quick to start."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mesanet.config.data import DataConfig, PrepareConfig
from mesanet.config.model import ModelConfig
from mesanet.config.training import RunConfig, TrainingConfig
from mesanet.data.preparation import prepare
from mesanet.model.files import read_weights


def prepare_tiny(folder: Path) -> Path:
    """Forty short documents as bytes, a fifth of them held out."""
    words = random.Random(0).choices(["mesa", "layer", "solves", "the", "ridge", "regression", "again"], k=4000)
    text = "\n@@\n".join(" ".join(words[start : start + 100]) for start in range(0, len(words), 100))
    source = folder / "text.txt"
    source.write_text(text)
    prepare(
        PrepareConfig(
            sources=(str(source),),
            out=folder / "data",
            tokenizer="bytes",
            separator="\n@@\n",
            validation_fraction=0.2,
            workers=0,
        ),
        quiet=True,
    )
    return folder / "data"


def tiny_run(data: Path, *, mixers: tuple[str, ...] = ("mesa",), layers: int = 1, **training: Any) -> RunConfig:
    """A model of width 32 on sequences of 32 bytes, in batches of 4."""
    settings: dict[str, Any] = {
        "steps": 12,
        "warmup_steps": 3,
        "peak_learning_rate": 1e-2,
        "validation_interval": 6,
        "validation_tokens": 256,
        "checkpoint_interval": 4,
        "device": "cpu",
    }
    return RunConfig(
        model=ModelConfig(mixers=mixers, layers=layers, width=32, heads=2, key_size=8, vocabulary=257),
        data=DataConfig(path=data, sequence_length=32, batch_size=4, prefetch=1),
        training=TrainingConfig(**{**settings, **training}),
    )


def metrics(run: Path) -> list[dict[str, Any]]:
    """What a run has measured, but for the times."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if name not in ("seconds", "tokens_per_second")} for line in lines
    ]


def losses(run: Path, kind: str = "train") -> list[float]:
    """The losses of one kind, in order."""
    return [line["loss"] for line in metrics(run) if line["kind"] == kind]


def assert_same_weights(first: Path, second: Path) -> None:
    """Every tensor of two models is equal to the last bit."""
    ours, theirs = (read_weights(folder / "model.safetensors") for folder in (first, second))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def quick_processes() -> Any:
    """A multiprocessing context whose processes have torch imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mesanet.training.run", "tests.training.tiny"])
    return context


def in_process(job: Callable[..., None], arguments: tuple[Any, ...], environment: dict[str, str]) -> None:
    """What a process of `start` runs."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    job(*arguments)


def start(job: Callable[..., None], *arguments: Any, environment: dict[str, str] | None = None) -> Any:
    """Call `job` in a process of its own, and return the process."""
    process = quick_processes().Process(target=in_process, args=(job, arguments, environment or {}))
    process.start()
    return process
