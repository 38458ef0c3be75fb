"""The folder of a run: whose it is, and what is in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mesanet import __version__
from mesanet.config.base import to_dict
from mesanet.config.training import RunConfig
from mesanet.errors import UserError
from mesanet.io import read_json, write_bytes_atomic, write_json_atomic
from mesanet.training.checkpoint import CHECKPOINTS, list_checkpoints, step_of, sweep_leftovers
from mesanet.training.metrics import METRICS_FILE

RUN_CONFIG_FILE = "config.json"
FACTS_FILE = "run.json"
FINAL_MODEL = "model"
LOCK_FILE = ".lock"
TOKENIZER_FILE = "tokenizer.json"

NEUTRAL = frozenset(
    {"training." + name for name in ("parallel", "device", "checkpoint_interval", "keep", "tensorboard", "compile")}
    | {"training.accumulation", "training.activation_checkpointing", "data.path", "data.prefetch", "prepare"}
)
"""What may change on resuming: how the run is computed and where things lie, not what is computed."""


def claim(folder: Path, config: RunConfig, fingerprint: str, *, resume: bool) -> None:
    """Make the folder this run's, or refuse and leave it as it is."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; choose another folder with --out")
    known = folder / RUN_CONFIG_FILE
    if known.exists():
        check_same(folder, config, fingerprint)
        if not resume:
            raise UserError(f"{folder} already holds this run, {how_far(folder)}; add --resume to go on with it")
    elif (folder / METRICS_FILE).exists() or (folder / CHECKPOINTS).exists():
        raise UserError(f"{folder} holds a run but no {RUN_CONFIG_FILE} that says which; choose another folder")
    (folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    sweep_leftovers(folder / CHECKPOINTS)
    shutil.rmtree(folder / f".{FINAL_MODEL}.partial", ignore_errors=True)
    facts = {"data": fingerprint, "mesanet": __version__, "torch": torch.__version__}
    write_json_atomic(folder / FACTS_FILE, facts)
    write_json_atomic(known, to_dict(config))


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
    facts = read_json(folder / FACTS_FILE) if (folder / FACTS_FILE).exists() else {}
    if facts.get("data", fingerprint) != fingerprint:
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


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a second run out of the folder; the lock goes with the process, however that ends."""
    try:
        import fcntl
    except ImportError:  # Windows has no such locks.
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another process is training in {folder}; wait for it, or choose another folder"
            ) from error
        yield
    finally:
        os.close(descriptor)
