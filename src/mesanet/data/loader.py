"""Batches as torch tensors, made ready by a thread while the step before them runs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import NamedTuple

import torch

from mesanet.config.data import DataConfig
from mesanet.data.dataset import Dataset
from mesanet.data.packing import Batches


class TensorBatch(NamedTuple):
    """The rows of one step that one process works on."""

    step: int
    """The step, counted from 0."""
    tokens: torch.Tensor
    """Inputs [B, T], int64."""
    targets: torch.Tensor
    """The token after each input, or -100 where there is no loss [B, T], int64."""


class Loader:
    """Gives the batches of the steps from `first_step` on, up to but without `last_step`.

    What goes wrong in the thread is raised where the batch is asked for. Close it, or use it in a `with` statement.
    """

    def __init__(
        self,
        batches: Batches,
        *,
        first_step: int = 0,
        last_step: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        prefetch: int = 2,
        pin_memory: bool = False,
    ) -> None:
        self._batches = batches
        self._next, self._last = first_step, last_step
        self._rank, self._world_size = rank, world_size
        self._pin = pin_memory
        self._ready: queue.Queue[TensorBatch | BaseException] = queue.Queue(max(prefetch, 1))
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if prefetch > 0:
            self._thread = threading.Thread(target=self._work, args=(first_step,), name="batches", daemon=True)
            self._thread.start()

    def __iter__(self) -> Iterator[TensorBatch]:
        return self

    def __next__(self) -> TensorBatch:
        if self._stopped.is_set() or (self._last is not None and self._next >= self._last):
            raise StopIteration
        item = self._ready.get() if self._thread is not None else self._make(self._next)
        if isinstance(item, BaseException):
            self.close()
            raise item
        assert item.step == self._next, (item.step, self._next)
        self._next += 1
        return item

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread and wait for it."""
        self._stopped.set()
        while self._thread is not None and self._thread.is_alive():
            # The thread may be waiting for room.
            try:
                self._ready.get_nowait()
            except queue.Empty:
                self._thread.join(timeout=0.05)

    def _work(self, step: int) -> None:
        while not self._stopped.is_set() and (self._last is None or step < self._last):
            try:
                item: TensorBatch | BaseException = self._make(step)
            except BaseException as error:  # noqa: BLE001 - raised again by the one who asks for the batch
                item = error
            self._ready.put(item)
            if isinstance(item, BaseException):
                return
            step += 1

    def _make(self, step: int) -> TensorBatch:
        tokens, targets = map(torch.from_numpy, self._batches.batch(step, self._rank, self._world_size))
        if self._pin:
            tokens, targets = tokens.pin_memory(), targets.pin_memory()
        return TensorBatch(step, tokens, targets)


def make_batches(dataset: Dataset, config: DataConfig) -> Batches:
    """Return the training batches that a config describes."""
    return Batches(
        dataset.train,
        dataset.bos,
        sequence_length=config.sequence_length,
        batch_size=config.batch_size,
        seed=config.seed,
    )
