"""Several processes: which one this is, what they tell each other, and how they share a model.

torchrun starts the processes and tells them about each other; torch.distributed does the rest.
"""

from __future__ import annotations

import gc
import os
import pickle
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mesanet.config.training import TrainingConfig
from mesanet.errors import UserError
from mesanet.model.backbone import LanguageModel
from mesanet.training.told import told

Value = TypeVar("Value")

PATIENCE = timedelta(days=14)
"""How long the other processes wait while the first one prepares data, hashes shards or writes files. The steps
themselves keep torch's own limit, so that a process that hangs there is noticed."""


@dataclass(frozen=True)
class Processes:
    """The processes of one run, seen from one of them. A single process makes no collective calls."""

    rank: int
    count: int
    device: torch.device
    patient: dist.ProcessGroup | None = None
    """The group for words and files rather than numbers, with a limit of `PATIENCE`."""

    @property
    def first(self) -> bool:
        """Whether this is the one that writes files and prints."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether the flag is true in one of the processes at least."""
        if self.count == 1:
            return flag
        return bool(self.sum(torch.tensor(float(flag), device=self.device)) > 0)

    def collect(self, value: Value) -> list[Value]:
        """What all processes have to say, in their order."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.patient)
        return values

    def barrier(self) -> None:
        """Wait for all."""
        if self.count > 1:
            dist.barrier(group=self.patient)

    def from_first(self, make: Callable[[], Value]) -> Value:
        """Let the first process call `make`; all get what it returned, or raise the exception that it raised."""
        if self.count == 1:
            return make()
        outcome: list[Any] = [None, None]
        if self.first:
            try:
                outcome[0] = make()
            except Exception as error:
                # Whatever went wrong, the others are waiting to hear of it.
                dist.broadcast_object_list([None, portable(error)], src=0, group=self.patient)
                raise
        dist.broadcast_object_list(outcome, src=0, group=self.patient)
        if outcome[1] is not None:
            raise told(outcome[1])
        value: Value = outcome[0]
        return value


def portable(error: Exception) -> Exception:
    """The exception itself, or one that says the same, where the original does not survive the way to a process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - an exception's own code runs here, and may fail in any way
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


@contextmanager
def connect(config: TrainingConfig) -> Iterator[Processes]:
    """Join the processes that torchrun has started, or stand alone."""
    count, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    device = choose_device(config.device)
    if count == 1:
        yield Processes(0, 1, device)
        return
    if config.parallel == "none":
        raise told(
            UserError(f"there are {count} processes: set training.parallel to ddp or fsdp to let them share the work")
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    already = dist.is_initialized()
    if not already:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None
        )
    patient = dist.new_group(backend="gloo", timeout=PATIENCE)
    try:
        yield Processes(rank, count, device, patient)
    except BaseException as error:
        clear_frames(error)
        raise
    finally:
        # What ddp wraps a model in has to go before the groups do. As the last one to hold a group it would wait for
        # gloo's threads without letting go of the interpreter, which these may need for an end of their own.
        gc.collect()
        dist.destroy_process_group(None if not already else patient)


def clear_frames(error: BaseException | None) -> None:
    """Let go of what the functions that an exception has left were working on; where it came from can still be told."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def choose_device(name: str) -> torch.device:
    """The device of this process; each process of a host gets a GPU of its own."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("training.device: got 'cuda', but torch finds no GPU here; expected 'auto' or 'cpu'")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise UserError(
            f"this host has {torch.cuda.device_count()} GPUs but more processes: lower torchrun's --nproc-per-node"
        )
    return torch.device("cuda", local)


class LossModule(nn.Module):
    """A model whose forward is its loss, which is what the wrappers of torch.distributed want to see."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss over the targets that count, and the loss of each token [B, T]."""
        mean, each, _ = self.model.losses(tokens, targets)
        return mean, each


def share_model(model: LanguageModel, config: TrainingConfig, processes: Processes) -> nn.Module:
    """The module that gives the loss, its gradients averaged over the processes; changes `model` for fsdp."""
    module = LossModule(model)
    if processes.count == 1:
        return module
    if config.parallel == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(module, gradient_as_bucket_view=True)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # The views that it warns of are the blocks' states after the last token, which training has no use for.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = init_device_mesh(processes.device.type, (processes.count,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


@contextmanager
def accumulating(module: nn.Module, *, last: bool) -> Iterator[None]:
    """Average the gradients over the processes in the last part of a step only."""
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    context: AbstractContextManager[Any] = nullcontext()
    if isinstance(module, DistributedDataParallel) and not last:
        context = module.no_sync()
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
    with context:
        yield
