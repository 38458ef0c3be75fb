"""The steps of a run, from where its newest checkpoint stands to the end."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mesanet.config.training import RunConfig
from mesanet.data.dataset import Dataset
from mesanet.data.loader import Loader, TensorBatch, make_batches
from mesanet.model.backbone import LanguageModel
from mesanet.training.checkpoint import Checkpoints
from mesanet.training.diagnosis import answer_refusals, state_is_finite
from mesanet.training.diagnosis import stop as stop_with_dump
from mesanet.training.distributed import Processes, accumulating, share_model
from mesanet.training.optimiser import clip_gradients, gradient_norm, make_optimiser, set_learning_rate
from mesanet.training.progress import Progress
from mesanet.training.records import Records
from mesanet.training.schedule import learning_rate
from mesanet.training.signals import Stop
from mesanet.training.validation import can_validate, validate


class Trainer:
    """One run, in one of its processes."""

    def __init__(self, config: RunConfig, out: Path, dataset: Dataset, processes: Processes) -> None:
        self.config, self.out, self.dataset, self.processes = config, out, dataset, processes
        training = config.training
        torch.manual_seed(training.seed)
        self.model = LanguageModel(config.model).to(processes.device)
        self.model.set_activation_checkpointing(training.activation_checkpointing)
        answer_refusals(self.model)
        if training.compile:
            compile_blocks(self.model)
        self.module = share_model(self.model, training, processes)
        self.optimiser = make_optimiser(self.model, training)
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.checkpoints = Checkpoints(out, training.keep, processes)
        self.step = 0
        self.loss = math.nan
        self._saved = 0
        self._parts: list[tuple[Tensor, Tensor]] = []

    def resume(self, progress: Progress) -> None:
        """Go back to the newest checkpoint that is whole, if there is one."""
        step = self.checkpoints.load_newest(self.model, self.optimiser, progress.say)
        self.step = self._saved = step or 0

    def run(self, records: Records, progress: Progress, stop: Stop) -> None:
        """Train to the end, or until somebody asks to stop; the state is saved either way, and all records with it."""
        loader = Loader(
            make_batches(self.dataset, self.config.data),
            first_step=self.step,
            last_step=self.config.steps,
            rank=self.processes.rank,
            world_size=self.processes.count,
            prefetch=self.config.data.prefetch,
            pin_memory=self.processes.device.type == "cuda",
        )
        self.module.train()
        with loader:
            # A run that was stopped in the middle of a validation begins with it.
            self._validate(records, stop)
            while self.step < self.config.steps and not self._stopping(stop, records):
                begin = time.perf_counter()
                norm = self.update(next(loader))
                self._record(records, progress, norm, time.perf_counter() - begin)
                self._validate(records, stop)
                if self.step % self.config.training.checkpoint_interval == 0 and self.step < self.config.steps:
                    self._save(records)
        self._save(records)
        records.sync()

    def precision(self) -> AbstractContextManager[Any]:
        """The context that forward passes run in."""
        if self.config.training.precision == "float32":
            return nullcontext()
        return torch.autocast(self.processes.device.type, dtype=torch.bfloat16)

    def update(self, batch: TensorBatch) -> float:
        """One step of the optimiser over the rows of all processes; returns the norm of the gradient."""
        device, training = self.processes.device, self.config.training
        parts = self._parts = split_rows(batch, training.accumulation, device)
        counts = [(targets >= 0).sum().double() for _, targets in parts]
        total = self.processes.sum(torch.stack(counts).sum()).clamp_min(1)
        loss = torch.zeros((), dtype=torch.float64, device=device)
        for number, (tokens, targets) in enumerate(parts):
            share = counts[number] / total
            with accumulating(self.module, last=number == len(parts) - 1):
                with self.precision():
                    mean, _ = self.module(tokens, targets)
                # The processes' gradients get averaged, and their sum is the gradient of the mean over all tokens.
                (mean * (share * self.processes.count)).backward()
            loss += mean.detach() * share
        self.loss = float(self.processes.sum(loss))
        norm = gradient_norm(self.parameters)
        if not (math.isfinite(self.loss) and math.isfinite(float(norm))):
            raise self._diagnosed(self.step + 1, self.loss, parts)
        clip_gradients(self.parameters, training.clip_norm, norm)
        set_learning_rate(self.optimiser, learning_rate(training, self.config.steps, self.step))
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.step += 1
        return float(norm)

    def _diagnosed(self, step: int, loss: float, parts: list[tuple[Tensor, Tensor]]) -> Exception:
        with self.precision():
            return stop_with_dump(self.out, step, loss, self.model, self.optimiser, self.module, parts, self.processes)

    def _check_state(self) -> None:
        """Stop before weights are used that an update has thrown out of range: nothing that holds them is written."""
        if self.processes.any(not state_is_finite(self.model, self.optimiser)):
            raise self._diagnosed(self.step, self.loss, self._parts)

    def _record(self, records: Records, progress: Progress, norm: float, seconds: float) -> None:
        tokens = self.config.tokens_per_step
        rate = learning_rate(self.config.training, self.config.steps, self.step - 1)
        records.write(
            {
                "kind": "train",
                "step": self.step,
                "tokens": self.step * tokens,
                "loss": self.loss,
                "learning_rate": rate,
                "gradient_norm": norm,
                "seconds": seconds,
                "tokens_per_second": tokens / seconds,
            }
        )
        progress.update(self.step, self.loss, rate, tokens / seconds)

    def _validate(self, records: Records, stop: Stop) -> None:
        """Validate if it is time and this step has not been validated."""
        interval, steps = self.config.training.validation_interval, self.config.steps
        due = self.step == steps or (interval > 0 and self.step > 0 and self.step % interval == 0)
        if not due or self.processes.from_first(lambda: records.validated(self.step)):
            return
        if not can_validate(self.dataset):
            return
        self._check_state()
        begin = time.perf_counter()
        found = validate(
            self.module,
            self.dataset,
            self.config,
            self.processes,
            self.precision,
            lambda: self._stopping(stop, records),
        )
        if found is not None:
            if not math.isfinite(found.loss):
                raise self._diagnosed(self.step, found.loss, [found.suspect])
            records.write(
                {
                    "kind": "validation",
                    "step": self.step,
                    "tokens": self.step * self.config.tokens_per_step,
                    "loss": found.loss,
                    "perplexity": found.perplexity,
                    "predicted_tokens": found.tokens,
                    "seconds": time.perf_counter() - begin,
                }
            )

    def _stopping(self, stop: Stop, records: Records) -> bool:
        """Whether any process was asked to stop, or can't write down what it measures."""
        return self.processes.any(stop.asked or records.failed)

    def _save(self, records: Records) -> None:
        if self.step > self._saved:
            self._check_state()
            records.sync()
            self.checkpoints.save(self.step, self.model, self.optimiser)
            self._saved = self.step


def split_rows(batch: TensorBatch, parts: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """The rows of a process in at most `parts` parts of (tokens, targets)."""
    tokens, targets = (tensor.to(device, non_blocking=True) for tensor in (batch.tokens, batch.targets))
    parts = min(parts, len(tokens))
    return list(zip(tokens.tensor_split(parts), targets.tensor_split(parts), strict=True))


def compile_blocks(model: LanguageModel) -> None:
    """Compile everything but what the mixers keep out: loops that depend on the data would be unrolled."""
    for block, mixer in zip(model.blocks, model.mixers(), strict=True):
        for name in mixer.eager:
            setattr(mixer, name, torch.compiler.disable(getattr(mixer, name)))
        block.compile()


def parameter_count(module: nn.Module) -> int:
    """Number of parameters."""
    return sum(parameter.numel() for parameter in module.parameters())
