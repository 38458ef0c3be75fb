"""The folder of a run: whose it is, and what is in it."""

from __future__ import annotations

import platform
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from mesanet import __version__
from mesanet.config.base import to_dict
from mesanet.config.training import RunConfig
from mesanet.errors import UserError
from mesanet.io import locked as lock_file
from mesanet.io import read_json, read_record, write_bytes_atomic, write_json_atomic
from mesanet.training.checkpoint import CHECKPOINTS, list_checkpoints, step_of, sweep_leftovers
from mesanet.training.distributed import Processes
from mesanet.training.metrics import METRICS_FILE
from mesanet.training.records import BOARD
from mesanet.training.told import told

RUN_CONFIG_FILE = "config.json"
FACTS_FILE = "run.json"
FINAL_MODEL = "model"
LOCK_FILE = ".lock"
SHARED = ".shared-"
TOKENIZER_FILE = "tokenizer.json"

NEUTRAL = frozenset(
    {"training." + name for name in ("parallel", "device", "checkpoint_interval", "keep", "tensorboard", "compile")}
    | {"training.accumulation", "training.activation_checkpointing", "data.path", "data.prefetch", "prepare"}
)
"""What may change on resuming: how the run is computed and where things lie, not what is computed."""


def claim(folder: Path, config: RunConfig, fingerprint: str, *, resume: bool) -> None:
    """Make the folder this run's, or refuse and leave it as it is; a finished run is left as it is, too.

    The config is the first thing in a new folder: whatever else a killed or failed run leaves behind, the next one
    can tell whose it is.
    """
    known = folder / RUN_CONFIG_FILE
    if known.exists():
        check_same(folder, config, fingerprint)
        if not resume:
            raise UserError(f"{folder} already holds this run, {how_far(folder)}; add --resume to go on with it")
        if (folder / FINAL_MODEL).is_dir():
            return
    else:
        check_free(folder)
    write_json_atomic(known, to_dict(config))
    facts = {"data": fingerprint, "mesanet": __version__, "torch": torch.__version__}
    write_json_atomic(folder / FACTS_FILE, facts)
    (folder / CHECKPOINTS).mkdir(exist_ok=True)
    sweep_leftovers(folder / CHECKPOINTS)
    shutil.rmtree(folder / f".{FINAL_MODEL}.partial", ignore_errors=True)
    for name in (RUN_CONFIG_FILE, FACTS_FILE, METRICS_FILE, TOKENIZER_FILE):
        for leftover in folder.glob(f".{name}.*.partial"):
            leftover.unlink(missing_ok=True)
    for leftover in folder.glob(f"{SHARED}*"):
        leftover.unlink(missing_ok=True)


def check_shared(folder: Path, processes: Processes) -> None:
    """Refuse a folder that is not one and the same for all processes: each writes a part of a checkpoint into it."""
    if processes.count == 1:
        return

    def mark() -> str:
        name = f"{SHARED}{uuid.uuid4().hex}"
        (folder / name).touch()
        return name

    name = processes.from_first(mark)
    found = processes.collect((platform.node(), (folder / name).exists()))
    processes.from_first(lambda: (folder / name).unlink())
    strangers = [f"process {rank} on {host}" for rank, (host, sees) in enumerate(found) if not sees]
    if strangers:
        raise told(
            UserError(
                f"{folder} of process 0 on {found[0][0]} is another folder for {', '.join(strangers)}: put the run "
                "folder on a disk that all hosts share"
            )
        )


def check_free(folder: Path) -> None:
    """Refuse a folder without a config that has anything in it that a run writes; no folder for checkpoints is any."""
    written = (FINAL_MODEL, FACTS_FILE, TOKENIZER_FILE, METRICS_FILE, BOARD)
    found = [name for name in written if (folder / name).exists()]
    checkpoints = folder / CHECKPOINTS
    if checkpoints.exists() and (not checkpoints.is_dir() or any(checkpoints.iterdir())):
        found.append(CHECKPOINTS)
    if found:
        raise UserError(
            f"{folder} holds {' and '.join(found)}, but no {RUN_CONFIG_FILE} that says of which run; choose another "
            "folder with --out"
        )


def copy_tokenizer(folder: Path, data: Path) -> None:
    """Keep the tokenizer beside the model, so that it can be found without the data."""
    if (data / TOKENIZER_FILE).exists():
        write_bytes_atomic(folder / TOKENIZER_FILE, (data / TOKENIZER_FILE).read_bytes())


def check_same(folder: Path, config: RunConfig, fingerprint: str) -> None:
    """Refuse a folder that holds a run with another config or other data."""
    before = read_json(folder / RUN_CONFIG_FILE)
    if not isinstance(before, dict):
        raise UserError(f"{folder / RUN_CONFIG_FILE} is not the config of a run; choose another folder with --out")
    then, now = dict(flatten(before)), dict(flatten(to_dict(config)))
    for name in sorted(then.keys() | now.keys()):
        neutral = any(name == field or name.startswith(f"{field}.") for field in NEUTRAL)
        if not neutral and then.get(name) != now.get(name):
            raise UserError(
                f"{folder} holds a run with another config: {name} is {then.get(name)!r} there and {now.get(name)!r} "
                "here; choose another folder with --out, or the same settings"
            )
    # A run that was killed as soon as it had begun has not said anything of its data.
    facts = folder / FACTS_FILE
    if facts.exists() and read_record(facts, {"data": str})["data"] != fingerprint:
        raise UserError(
            f"{config.data.path} no longer holds the data that {folder} was started with; restore it, or choose "
            "another folder with --out"
        )


def how_far(folder: Path) -> str:
    """Where a run stands, in words."""
    if (folder / FINAL_MODEL).is_dir():
        return "which is finished"
    checkpoints = list_checkpoints(folder / CHECKPOINTS)
    return f"at step {step_of(checkpoints[0])}" if checkpoints else "without a checkpoint"


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of nested tables."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def locked(folder: Path) -> AbstractContextManager[None]:
    """Keep a second run out of the folder; the lock goes with the process, however that ends."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; choose another folder with --out")
    busy = f"another process is training in {folder}; wait for it, or choose another folder"
    return lock_file(folder / LOCK_FILE, busy)
