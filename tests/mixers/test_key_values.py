"""Attention's keys and values as a value: what is appended to it by one is not seen by another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from threading import Barrier

import torch
from torch import Tensor

from mesanet.mixers.key_values import KeyValues


def tokens(number: float, count: int = 1) -> tuple[Tensor, Tensor]:
    return torch.full((8, 8, count, 2048), number), torch.full((8, 8, count, 2048), -number)


def appended(value: KeyValues, number: float) -> KeyValues:
    return value.append(*tokens(number), None, in_place=True)


def test_threads_that_append_to_the_same_value_get_slots_of_their_own() -> None:
    """The copy takes long enough for the other thread to come in between, where the slots are not claimed first."""
    start = appended(KeyValues.of(*tokens(0.0)), 0.0)
    together = Barrier(2)

    def branch(value: KeyValues, number: float) -> KeyValues:
        together.wait()
        return appended(value, number)

    with ThreadPoolExecutor(2) as threads:
        for _ in range(20):
            one, two = threads.map(branch, [start, start], [1.0, 2.0])
            assert (one.keys[:, :, -1] == 1).all()
            assert (one.values[:, :, -1] == -1).all()
            assert (two.keys[:, :, -1] == 2).all()
            assert (two.values[:, :, -1] == -2).all()
            start = appended(start, 0.0)


def test_a_value_can_be_copied() -> None:
    start = appended(KeyValues.of(*tokens(0.0)), 0.0)
    copy = deepcopy(start)
    assert torch.equal(appended(start, 1.0).keys, appended(copy, 1.0).keys)
