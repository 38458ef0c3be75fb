"""What the loader adds to a training step, beside the same step on batches that are in memory already."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from mesanet.bench.timing import machine, time_interleaved
from mesanet.config import check_fields, check_one_of, check_positive, to_dict
from mesanet.config.training import RunConfig
from mesanet.data.dataset import Dataset
from mesanet.data.loader import Loader, make_batches
from mesanet.data.packing import Batch, Batches
from mesanet.io import write_json_atomic
from mesanet.training.distributed import Processes, connect
from mesanet.training.loop import Trainer
from mesanet.training.presets import RUNS, run_preset
from mesanet.training.run import check_data, prepared

SIZES = ("width", "layers", "heads", "key_size")
"""Settings of the model that may take the place of the preset's."""


@dataclass(frozen=True, kw_only=True)
class LoaderBenchmark:
    """Time training steps that the loader feeds from prepared data beside the same steps on batches held in memory.

    Both run in turns within one process; a turn is several steps, so that the loader works ahead as it does in
    training.
    """

    preset: str = "laptop"
    """The training run, as for `mesanet train`; its data are prepared if they are not there."""
    mixers: str = "mesa"
    """Sequence mixers, or a pattern such as hawk-mesa."""
    width: int | None = None
    """Size of the residual stream; None for what the preset has."""
    layers: int | None = None
    """Number of layers; None for what the preset has."""
    heads: int | None = None
    """Heads of every mixer; None for what the preset has."""
    key_size: int | None = None
    """Size of a query and of a key of one head; None for what the preset has."""
    data: Path | None = None
    """Folder that `mesanet data prepare` wrote, instead of the preset's data; the vocabulary is its tokenizer's."""
    length: int | None = None
    """Tokens of a sequence; None for what the preset has."""
    batch: int | None = None
    """Sequences of a step; None for what the preset has."""
    steps: int = 10
    """Steps of a turn, and different batches."""
    repeats: int = 5
    """Turns of each that count, after one that does not."""
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """Where to run."""
    threads: int | None = None
    """Threads of torch on the processor; None leaves torch's own choice."""
    out: Path = Path("runs/bench-loader.json")
    """File for the record."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_one_of("preset", self.preset, RUNS)
        for name in ("steps", "repeats"):
            check_positive(name, getattr(self, name))
        for name in (*SIZES, "length", "batch", "threads"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        self.run(None)

    def run(self, vocabulary: int | None) -> RunConfig:
        """The training run whose steps are timed, with data of its own on their `vocabulary`."""
        run = run_preset(self.preset, self.mixers)
        sizes = {name: getattr(self, name) for name in SIZES if getattr(self, name) is not None}
        batches: dict[str, Any] = {"sequence_length": self.length, "batch_size": self.batch, "path": self.data}
        run = replace(
            run,
            model=replace(run.model, **sizes),
            data=replace(run.data, **{name: value for name, value in batches.items() if value is not None}),
            training=replace(run.training, device=self.device),
        )
        if self.data is None:
            return run
        return replace(run, model=replace(run.model, vocabulary=vocabulary or run.model.vocabulary), prepare=None)


def run_loader_benchmark(options: LoaderBenchmark, command: Sequence[str]) -> dict[str, Any]:
    """Measure, say what came of it, and write the record, which is returned."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with connect(options.run(None).training) as processes:
        dataset = prepared(options.run(None), processes, quiet=False)
        run = options.run(dataset.vocabulary)
        check_data(run, dataset, processes)
        record = {
            "command": " ".join(command),
            "benchmark": "loader",
            "settings": to_dict(options),
            "run": to_dict(run),
            "machine": machine(processes.device),
            **measure(options, run, dataset, processes),
        }
    write_json_atomic(options.out, record)
    print(describe(record))
    print(f"Record is in {options.out}")
    return record


def measure(options: LoaderBenchmark, run: RunConfig, dataset: Dataset, processes: Processes) -> dict[str, Any]:
    """Seconds of a step in each turn, of both kinds, and of making a batch with nothing beside it."""
    batches = SameAgain(make_batches(dataset, run.data), options.steps)
    pin = processes.device.type == "cuda"
    held = list(Loader(batches, last_step=options.steps, prefetch=0, pin_memory=pin))
    waited = 0.0
    with (
        tempfile.TemporaryDirectory() as scratch,
        Loader(batches, prefetch=run.data.prefetch, pin_memory=pin) as loader,
    ):
        trainer = Trainer(with_still_weights(run), Path(scratch), dataset, processes)

        def train_on_held() -> None:
            for batch in held:
                trainer.update(batch)

        def train_on_loaded() -> None:
            nonlocal waited
            for _ in held:
                asked = time.perf_counter()
                batch = next(loader)
                waited += time.perf_counter() - asked
                trainer.update(batch)

        turns = time_interleaved(
            {"held": train_on_held, "loaded": train_on_loaded}, repeats=options.repeats, device=processes.device
        )
    seconds = {name: [taken / options.steps for taken in timing.seconds] for name, timing in turns.items()}
    ratios = [loaded / alone for loaded, alone in zip(seconds["loaded"], seconds["held"], strict=True)]
    return {
        "seconds_per_step": seconds,
        "added": statistics.median(ratios) - 1,
        "added_to_best": min(seconds["loaded"]) / min(seconds["held"]) - 1,
        "waiting_seconds_per_step": waited / (options.steps * (options.repeats + 1)),
        "batch_seconds": [time_batch(batches, step) for step in range(options.steps)],
    }


class SameAgain(Batches):
    """The first so many batches over and over: how long mesa's solver takes depends on the tokens."""

    def __init__(self, batches: Batches, count: int) -> None:
        self._batches, self._count = batches, count

    def batch(self, step: int, rank: int = 0, world_size: int = 1) -> Batch:
        """The rows of a step, made anew each time."""
        return self._batches.batch(step % self._count, rank, world_size)


def with_still_weights(run: RunConfig) -> RunConfig:
    """The run with a learning rate so small that the same batch takes the same work at any step."""
    training = run.training
    return replace(run, training=replace(training, peak_learning_rate=training.start_learning_rate))


def time_batch(batches: Batches, step: int) -> float:
    """Seconds that making the batch of a step takes."""
    started = time.perf_counter()
    batches.batch(step)
    return time.perf_counter() - started


def describe(record: dict[str, Any]) -> str:
    """The record in one line."""
    best = {name: 1000 * min(values) for name, values in record["seconds_per_step"].items()}
    making = 1000 * statistics.median(record["batch_seconds"])
    return (
        f"the loader adds {record['added']:+.2%} to a training step (median of the turns; of the best "
        f"{record['added_to_best']:+.2%}): {best['loaded']:.1f} ms beside {best['held']:.1f} ms from memory; "
        f"a batch takes {making:.2f} ms to make, and a step waits {1000 * record['waiting_seconds_per_step']:.3f} ms"
    )
