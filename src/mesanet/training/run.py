"""One training run from its config to its final model."""

from __future__ import annotations

import math
import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from mesanet.config.training import RunConfig
from mesanet.data.dataset import Dataset, open_dataset
from mesanet.data.layout import INDEX
from mesanet.data.loader import make_batches
from mesanet.errors import UserError
from mesanet.io import sync_folder
from mesanet.mixers import mixer_class
from mesanet.model.files import CONFIG_FILE, WEIGHTS_FILE
from mesanet.training.checkpoint import CHECKPOINTS, list_checkpoints
from mesanet.training.distributed import Processes, connect
from mesanet.training.loop import Trainer, parameter_count
from mesanet.training.metrics import METRICS_FILE, read_metrics
from mesanet.training.progress import Progress
from mesanet.training.records import Records
from mesanet.training.run_folder import FINAL_MODEL, check_shared, claim, copy_tokenizer, locked
from mesanet.training.signals import watch_signals
from mesanet.training.validation import can_validate


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What a finished run ended with."""

    out: Path
    """The run folder."""
    model: Path
    """Folder of the final model, for `load_model`."""
    steps: int
    """Number of updates."""
    loss: float
    """Training loss of the last update."""
    validation_loss: float | None
    """Loss on held-out text at the end; None without such text."""


def train(
    config: RunConfig, out: str | os.PathLike[str], *, resume: bool = False, quiet: bool = False
) -> TrainingResult:
    """Train in the folder `out`, or go on there with `resume`; a finished run is left as it is.

    Ctrl-C or SIGTERM saves a checkpoint and raises KeyboardInterrupt. Every process that torchrun started has to call
    this with the same arguments.
    """
    folder = Path(out)
    with connect(config.training) as processes, ExitStack() as held:
        quiet = quiet or not processes.first
        dataset = prepared(config, processes, quiet=quiet)
        processes.from_first(lambda: check_data(config, dataset, processes))
        try:
            processes.from_first(lambda: held.enter_context(locked(folder)))
            processes.from_first(lambda: claim(folder, config, dataset.fingerprint, resume=resume))
            check_shared(folder, processes)
            run(config, folder, dataset, processes, quiet=quiet)
        except OSError as error:
            # A write that fails, on a full disk above all, does not say where.
            error.filename = error.filename or str(folder)
            error.add_note("its checkpoints are whole, and --resume goes on from the newest")
            raise
        processes.barrier()
    return read_result(folder)


def prepared(config: RunConfig, processes: Processes, *, quiet: bool) -> Dataset:
    """Open the data, preparing them first where they do not exist and the config says how."""
    folder, how = config.data.path, config.prepare
    if how is not None and how.out == folder and not (folder / INDEX).exists():
        from mesanet.data.preparation import prepare

        processes.from_first(lambda: prepare(how, quiet=quiet))
    # The checksums are for one process to look at.
    processes.from_first(lambda: open_dataset(folder).fingerprint)
    return open_dataset(folder, verify=False)


def check_data(config: RunConfig, dataset: Dataset, processes: Processes) -> None:
    """Refuse data that the model or the batches do not fit."""
    if dataset.vocabulary > config.model.vocabulary:
        raise UserError(
            f"model.vocabulary: got {config.model.vocabulary}, but the tokenizer of {config.data.path} has "
            f"{dataset.vocabulary} tokens; set it to that"
        )
    for name in config.model.mixers:
        mixer_class(name)
    make_batches(dataset, config.data).batch(0, 0, processes.count)


def run(config: RunConfig, folder: Path, dataset: Dataset, processes: Processes, *, quiet: bool) -> None:
    """Train to the end and write the final model, or raise KeyboardInterrupt with the state saved."""
    if processes.from_first(lambda: (folder / FINAL_MODEL).is_dir()):
        return
    training = config.training
    trainer = Trainer(config, folder, dataset, processes)
    opening = Progress(0, config.steps, quiet=quiet)
    trainer.resume(opening)
    processes.from_first(lambda: copy_tokenizer(folder, config.data.path))
    opening.say(introduction(config, folder, trainer))
    if not can_validate(dataset):
        opening.say(f"{config.data.path} has no held-out text, so there is no validation")
    with (
        Records(folder, trainer.step, processes, tensorboard=training.tensorboard) as records,
        Progress(trainer.step, config.steps, quiet=quiet) as progress,
        watch_signals() as stop,
    ):
        trainer.run(records, progress, stop)
    # Looked at when the signals have their usual meaning again, so that none is lost, not even one after the last step.
    if processes.any(stop.asked):
        where = f"at step {trainer.step}, which is saved" if trainer.step else "before the first step"
        opening.say(f"stopped {where}; go on with --resume")
        raise KeyboardInterrupt
    processes.from_first(lambda: write_final_model(folder))


def introduction(config: RunConfig, folder: Path, trainer: Trainer) -> str:
    """One line about what is about to happen."""
    model = f"{'-'.join(config.model.mixers)}, {parameter_count(trainer.model):,} parameters"
    start = f"going on at step {trainer.step} of {config.steps}" if trainer.step else f"{config.steps} steps"
    tokens = f"{config.steps * config.tokens_per_step:,} tokens"
    return f"{folder}: {model}, {start}, {tokens}, on {trainer.processes.count} x {trainer.processes.device.type}"


def write_final_model(folder: Path) -> None:
    """Copy the weights of the last checkpoint to where they stay, the folder whole or absent."""
    newest = list_checkpoints(folder / CHECKPOINTS)[0]
    partial = folder / f".{FINAL_MODEL}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for name in (WEIGHTS_FILE, CONFIG_FILE):
        shutil.copyfile(newest / name, partial / name)
        with (partial / name).open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(partial)
    partial.rename(folder / FINAL_MODEL)
    sync_folder(folder)


def read_result(folder: Path) -> TrainingResult:
    """What the run in this folder ended with."""
    losses: dict[str, float] = {}
    steps = 0
    for record in read_metrics(folder / METRICS_FILE):
        if record["step"] > steps:
            # A validation of an earlier step says nothing about the end.
            losses, steps = {}, record["step"]
        losses[record["kind"]] = record["loss"]
    return TrainingResult(
        out=folder,
        model=folder / FINAL_MODEL,
        steps=steps,
        loss=losses.get("train", math.nan),
        validation_loss=losses.get("validation"),
    )
