"""Loading: the same batches with and without a thread, from any step on, and no mistake is lost."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from mesanet.data import Batches, Dataset, Loader
from mesanet.data.packing import Batch


@pytest.fixture
def batches(dataset: Dataset) -> Batches:
    return Batches(dataset.train, dataset.bos, sequence_length=24, batch_size=4, seed=5)


@pytest.mark.parametrize("prefetch", [0, 1, 4])
@pytest.mark.parametrize(("first", "last"), [(0, 6), (3, 6), (6, 6)])
def test_steps_come_in_order(batches: Batches, prefetch: int, first: int, last: int) -> None:
    with Loader(batches, first_step=first, last_step=last, prefetch=prefetch) as loader:
        found = list(loader)
    assert [item.step for item in found] == list(range(first, last))
    for item in found:
        expected = batches.batch(item.step)
        assert torch.equal(item.tokens, torch.from_numpy(expected.tokens))
        assert torch.equal(item.targets, torch.from_numpy(expected.targets))
        assert item.tokens.dtype == item.targets.dtype == torch.int64


def test_ranks_get_their_rows(batches: Batches) -> None:
    parts = []
    for rank in range(2):
        with Loader(batches, last_step=1, rank=rank, world_size=2) as loader:
            parts.append(next(loader).tokens)
    assert np.array_equal(torch.cat(parts).numpy(), batches.batch(0).tokens)


class _BreaksAtTwo:
    """Stands for data that turn out to be damaged in the middle of training."""

    def batch(self, step: int, rank: int, world_size: int) -> Batch:
        if step == 2:
            raise ValueError("shard 7 is damaged")
        return Batch(np.zeros((1, 1), np.int64), np.zeros((1, 1), np.int64))


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_a_mistake_is_raised_at_its_step(prefetch: int) -> None:
    loader = Loader(_BreaksAtTwo(), prefetch=prefetch)  # type: ignore[arg-type]
    assert [next(loader).step, next(loader).step] == [0, 1]
    with pytest.raises(ValueError, match="shard 7 is damaged"):
        next(loader)
    with pytest.raises((StopIteration, ValueError)):
        next(loader)
    loader.close()


def test_closing_ends_the_thread(batches: Batches) -> None:
    before = threading.active_count()
    loader = Loader(batches, prefetch=2)
    next(loader)
    loader.close()
    loader.close()
    assert threading.active_count() == before
    with pytest.raises(StopIteration):
        next(loader)
