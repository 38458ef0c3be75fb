"""The loss on held-out text, packed as in training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mesanet.config.training import RunConfig
from mesanet.data.dataset import Dataset
from mesanet.data.packing import IGNORED, Batch, packed_windows
from mesanet.training.distributed import Processes

ROWS = 16
"""Sequences that a process takes at once, if the batches of training are not smaller."""


class Validation(NamedTuple):
    """What a validation found."""

    loss: float
    """Mean negative log likelihood of a token."""
    tokens: int
    """Number of tokens that were predicted."""
    suspect: tuple[Tensor, Tensor]
    """This process's first (tokens, targets) whose loss is not finite; the last ones if there are none."""

    @property
    def perplexity(self) -> float:
        """e to the loss."""
        return math.exp(min(self.loss, 700.0))


def can_validate(dataset: Dataset) -> bool:
    """Whether there is held-out text: one token and the BOS before it at least."""
    return dataset.validation.tokens > 0


def validate(
    module: nn.Module,
    dataset: Dataset,
    config: RunConfig,
    processes: Processes,
    precision: Callable[[], Any],
    stopping: Callable[[], bool],
) -> Validation | None:
    """The loss of the model on the same held-out tokens every time; None if it was told to stop on the way."""
    totals = torch.zeros(2, dtype=torch.float64, device=processes.device)
    finite = True
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            for batch in validation_batches(dataset, config, processes):
                if stopping():
                    return None
                tokens, targets = (torch.from_numpy(array).to(processes.device) for array in batch)
                if finite:
                    suspect = tokens, targets
                with precision():
                    _, each = module(tokens, targets)
                loss = each.double().sum()
                finite = finite and bool(torch.isfinite(loss))
                totals += torch.stack([loss, (targets >= 0).sum().double()])
    finally:
        module.train(training)
    total, count = processes.sum(totals).tolist()
    return Validation(total / max(count, 1.0), int(count), suspect)


def validation_batches(dataset: Dataset, config: RunConfig, processes: Processes) -> Iterator[Batch]:
    """This process's rows; each process gets equally many batches of one shape, the last filled up without loss."""
    length = config.data.sequence_length
    rows = min(ROWS, max(1, config.data.batch_size // processes.count // config.training.accumulation))
    most = config.training.validation_tokens
    sequences = None if most is None else max(1, most // length)
    windows = packed_windows(
        dataset.validation,
        dataset.bos,
        sequence_length=length,
        batch_size=rows * processes.count,
        seed=config.data.seed,
    )
    left = sequences
    for batch in islice(windows, None if sequences is None else -(-sequences // (rows * processes.count))):
        whole = batch if left is None else Batch(batch.tokens[:left], batch.targets[:left])
        left = None if left is None else left - len(whole.tokens)
        own = slice(processes.rank * rows, (processes.rank + 1) * rows)
        missing = rows - len(whole.tokens[own])
        yield Batch(
            np.pad(whole.tokens[own], ((0, missing), (0, 0)), constant_values=dataset.bos),
            np.pad(whole.targets[own], ((0, missing), (0, 0)), constant_values=IGNORED),
        )
