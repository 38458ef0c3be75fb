"""Checkpoints that are whole or absent, and that load with another number of processes.

    step_00000100/
      model.safetensors, config.json   the model as a folder that `load_model` reads
      state/                           optimiser, step and random state, by torch.distributed.checkpoint
      checksums.json                   size and SHA-256 of every other file

A checkpoint is written into a hidden folder, flushed to the disk and renamed. What a crash leaves behind is hidden,
too, and removed by the next run.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.tensor import DTensor, distribute_tensor

from mesanet.config.base import to_dict
from mesanet.errors import UserError
from mesanet.io import file_digest, read_json, sync_folder, write_atomic, write_json_atomic
from mesanet.model.backbone import LanguageModel
from mesanet.model.files import CONFIG_FILE, WEIGHTS_FILE, read_weights
from mesanet.training.distributed import Processes
from mesanet.training.optimiser import whole
from mesanet.training.told import told

CHECKPOINTS = "checkpoints"
CHECKSUMS_FILE = "checksums.json"
STATE = "state"
NEEDED = (WEIGHTS_FILE, CONFIG_FILE, f"{STATE}/.metadata")
"""Files that a checkpoint can't be without."""
PARTIAL, REMOVED, DAMAGED = ".partial", ".removed", ".damaged"
DAMAGED_KEPT = 2
"""How many damaged checkpoints are kept to be looked at."""


class Checkpoints:
    """The checkpoints of one run; every process has to make the same calls."""

    def __init__(self, run: Path, keep: int, processes: Processes) -> None:
        self.folder = run / CHECKPOINTS
        self._keep = keep
        self._processes = processes

    def save(self, step: int, model: LanguageModel, optimiser: torch.optim.Optimizer) -> None:
        """Write the checkpoint of this step, then remove all but the newest."""
        target = self.folder / checkpoint_name(step)
        partial = hidden(target, PARTIAL)
        self._processes.from_first(lambda: start_folder(partial))
        state = collect_state(model, optimiser, step, self._processes.device)
        try:
            self._processes.from_first(lambda: check_room(partial, state, model))
            self._write_state(state, partial / STATE)
            weights = gather_weights(model, keep=self._processes.first)
            self._processes.from_first(lambda: self._finish(partial, target, model, weights))
        except BaseException:
            if self._processes.first:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def load_newest(
        self, model: LanguageModel, optimiser: torch.optim.Optimizer, say: Callable[[str], object]
    ) -> int | None:
        """Load the newest checkpoint that is whole and return its step, or None where there is no checkpoint."""
        chosen, problems = self._processes.from_first(lambda: choose(self.folder))
        for problem in problems:
            say(problem)
        if chosen is None:
            return None
        set_full_weights(model, read_weights(chosen / WEIGHTS_FILE))
        return self._read_state(chosen / STATE, model, optimiser)

    def _write_state(self, state: dict[str, Any], folder: Path) -> None:
        alone = self._processes.count == 1
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", module="torch.distributed")
                save_shards(
                    state,
                    storage_writer=FileSystemWriter(folder, sync_files=True),
                    process_group=self._processes.patient,
                    no_dist=alone,
                )
        except CheckpointException as error:
            raise told(cause_of(error)) from error

    def _read_state(self, folder: Path, model: LanguageModel, optimiser: torch.optim.Optimizer) -> int:
        reader = FileSystemReader(folder)
        state = blank_state(model, optimiser, self._processes.device)
        stored = reader.read_metadata().state_dict_metadata
        # A checkpoint of a CPU has no GPU's random state.
        state["random"] = {name: value for name, value in state["random"].items() if f"random.{name}" in stored}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", module="torch.distributed")
                load_shards(
                    state,
                    storage_reader=reader,
                    process_group=self._processes.patient,
                    no_dist=self._processes.count == 1,
                )
        except CheckpointException as error:
            raise told(cause_of(error)) from error
        names = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        for name, moments in state["optimiser"].items():
            optimiser.state[names[name]] = moments
        set_random_state(state["random"])
        return int(state["step"])

    def _finish(self, partial: Path, target: Path, model: LanguageModel, weights: dict[str, Tensor]) -> None:
        check_parts(partial / STATE)
        write_weights(partial / WEIGHTS_FILE, weights)
        write_json_atomic(partial / CONFIG_FILE, to_dict(model.config))
        write_json_atomic(partial / CHECKSUMS_FILE, checksums(partial))
        for folder in (partial / STATE, partial):
            sync_folder(folder)
        if target.exists():
            remove(target)
        partial.rename(target)
        sync_folder(self.folder)
        for old in list_checkpoints(self.folder)[self._keep :]:
            remove(old)


def checkpoint_name(step: int) -> str:
    """Folder name of a step's checkpoint."""
    return f"step_{step:08}"


def step_of(path: Path) -> int:
    """The step of a checkpoint's folder."""
    return int(path.name.removeprefix("step_"))


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first; nothing is said about whether they are whole."""
    # Not with glob, to which a folder that can't be read is an empty one.
    found = folder.iterdir() if folder.exists() else ()
    steps = (path for path in found if re.fullmatch(r"step_\d+", path.name) and path.is_dir())
    return sorted(steps, key=step_of, reverse=True)


def choose(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and what there is to say of newer ones, which are put aside.

    Where there are checkpoints, but none is whole or one can't be read, a UserError leaves all as it is: to begin anew
    would be to throw the run's history away.
    """
    damaged: dict[Path, str] = {}
    for path in list_checkpoints(folder):
        try:
            problem = damage(path)
        except OSError as error:
            raise UserError(
                f"checkpoint {path} could not be read ({error}); nothing was changed: give the command again when the "
                "disk answers, or move that checkpoint elsewhere to go on from the one before"
            ) from error
        if problem is None:
            for each in damaged:
                put_aside(each)
            return path, [f"{text}; going back to {path.name}" for text in damaged.values()]
        damaged[path] = f"checkpoint {path} is damaged ({problem})"
    if damaged:
        raise UserError(
            f"{'; '.join(damaged.values())}; there is no other: restore one from a copy, or choose another folder with "
            "--out to begin anew"
        )
    return None, []


def put_aside(path: Path) -> None:
    """Hide a damaged checkpoint, and keep only the newest of those that are hidden."""
    aside = hidden(path, DAMAGED)
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    for old in sorted(path.parent.glob(f".step_*{DAMAGED}"))[:-DAMAGED_KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None for one whose files are all as they were written.

    That a file is not there is damage. That it can't be read is an OSError, which may be gone in a minute.
    """
    try:
        expected = read_json(path / CHECKSUMS_FILE)
        if not isinstance(expected, dict):
            return f"{CHECKSUMS_FILE} holds no table"
        for name in NEEDED:
            if name not in expected:
                return f"{CHECKSUMS_FILE} does not list {name}"
        for name, (size, digest) in expected.items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != size or file_digest(file) != digest:
                return f"{name} is not as it was written"
    except (FileNotFoundError, ValueError, TypeError) as error:
        return str(error)
    return None


def check_parts(state: Path) -> None:
    """Refuse a state of which a process has written its part to where the first one does not see it."""
    needed = {info.relative_path for info in FileSystemReader(state).read_metadata().storage_data.values()}
    missing = sorted(name for name in needed if not (state / name).is_file())
    if missing:
        raise UserError(
            f"{state} lacks {', '.join(missing)}, which other processes have written: put the run folder on a disk "
            "that all hosts share"
        )


def checksums(folder: Path) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of every file in a folder; all of them are on the disk afterwards."""
    found = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
        found[file.relative_to(folder).as_posix()] = (file.stat().st_size, file_digest(file))
    return found


def start_folder(partial: Path) -> None:
    """An empty folder to write into."""
    shutil.rmtree(partial, ignore_errors=True)
    (partial / STATE).mkdir(parents=True)


def remove(path: Path) -> None:
    """Remove a checkpoint so that it is never seen in parts."""
    gone = hidden(path, REMOVED)
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)
    shutil.rmtree(gone)


def sweep_leftovers(folder: Path) -> None:
    """Remove what a crash left half written or half removed."""
    for suffix in (PARTIAL, REMOVED):
        for path in folder.glob(f".step_*{suffix}"):
            shutil.rmtree(path, ignore_errors=True)


def hidden(path: Path, suffix: str) -> Path:
    """Where a checkpoint lies while it is none."""
    return path.with_name(f".{path.name}{suffix}")


def write_weights(path: Path, weights: dict[str, Tensor]) -> None:
    """Write tensors as safetensors, the whole file or nothing."""
    from safetensors.torch import save

    write_atomic(path, lambda file: file.write(save(weights, metadata={"format": "pt"})))


def gather_weights(model: LanguageModel, *, keep: bool) -> dict[str, Tensor]:
    """The model's whole tensors in memory, where `keep` is true; every process has to take part."""
    weights = {}
    for name, tensor in model.state_dict().items():
        full = whole(tensor.detach())
        if keep:
            weights[name] = full.cpu().contiguous()
    return weights


def set_full_weights(model: LanguageModel, weights: dict[str, Tensor]) -> None:
    """Copy whole tensors into a model, or into this process's part of it."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            source = weights[name].to(tensor.device)
            if isinstance(tensor, DTensor):
                source = distribute_tensor(source, tensor.device_mesh, tensor.placements, src_data_rank=None)
            tensor.copy_(source)


def collect_state(
    model: LanguageModel, optimiser: torch.optim.Optimizer, step: int, device: torch.device
) -> dict[str, Any]:
    """What a checkpoint holds beside the weights, by the names of the parameters."""
    moments = {
        name: optimiser.state[parameter] for name, parameter in model.named_parameters() if parameter in optimiser.state
    }
    return {"optimiser": moments, "step": torch.tensor(step), "random": random_state(device)}


def blank_state(model: LanguageModel, optimiser: torch.optim.Optimizer, device: torch.device) -> dict[str, Any]:
    """Tensors for `load` to fill, laid out as this process needs them."""
    trained = {id(parameter) for group in optimiser.param_groups for parameter in group["params"]}
    moments = {
        name: {
            "step": torch.zeros((), device=device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
        for name, parameter in model.named_parameters()
        if id(parameter) in trained
    }
    return {"optimiser": moments, "step": torch.tensor(0), "random": random_state(device)}


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The state of torch's generators, which is the same in every process."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor]) -> None:
    """Go on drawing where the checkpoint stopped."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def cause_of(error: CheckpointException) -> Exception:
    """The ordinary exception of the first process that failed: the operating system's own, if that was behind it."""
    causes = [cause for cause, _ in error.failures.values() if isinstance(cause, Exception)]
    for cause in causes:
        inner: BaseException | None = cause
        while inner is not None and not isinstance(inner, OSError):
            # torch's serialisation turns a failed write into a complaint about the position in the file.
            inner = inner.__cause__ or inner.__context__
        if isinstance(inner, OSError):
            return inner
    return causes[0] if causes else UserError(str(error))


def check_room(folder: Path, state: dict[str, Any], model: LanguageModel) -> None:
    """Refuse to begin what can't fit on the disk, so that the error is the same in every process."""
    moments = (tensor for entry in state["optimiser"].values() for tensor in entry.values())
    needed = sum(tensor.numel() * tensor.element_size() for tensor in (*moments, *model.state_dict().values()))
    if shutil.disk_usage(folder).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
