"""The seeded order: a bijection at every size, different for every seed, and the same for ever."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesanet.data.permutation import Permutation


@given(size=st.integers(1, 5000), seed=st.integers(0, 2**63))
def test_every_number_comes_once(size: int, seed: int) -> None:
    order = Permutation(size, seed)(np.arange(size))
    assert sorted(order.tolist()) == list(range(size))


@pytest.mark.parametrize("size", [10**9, 2**40, 2**61 + 3])
def test_large_sizes_stay_inside_and_do_not_collide(size: int) -> None:
    places = np.arange(0, size, size // 10_000)
    values = Permutation(size, 1)(places)
    assert values.min() >= 0
    assert values.max() < size
    assert len(np.unique(values)) == len(places)


def test_a_place_by_itself_is_the_same_as_among_others() -> None:
    order = Permutation(1000, 5, 6)
    together = order(np.arange(1000).reshape(10, 100))
    assert [int(order(np.array([i]))[0]) for i in range(1000)] == together.ravel().tolist()


def test_the_order_never_changes() -> None:
    """Written down once: a change here would change the order of every training that is being resumed."""
    assert Permutation(10, 0)(np.arange(10)).tolist() == [7, 3, 2, 0, 8, 5, 4, 6, 9, 1]
    assert Permutation(10**12, 7, 3)(np.arange(3)).tolist() == [37289029005, 444138940878, 758843263533]


def test_all_orders_of_four_are_about_equally_likely() -> None:
    """24 orders, 4,800 seeds: 200 each, with a standard deviation of 14; six of them are no accident."""
    counts = Counter(tuple(Permutation(4, seed)(np.arange(4)).tolist()) for seed in range(4_800))
    assert len(counts) == 24
    assert max(abs(count - 200) for count in counts.values()) < 6 * 14


def test_neighbours_are_torn_apart() -> None:
    """The mean distance of two random places is a third of the size; its standard error here is 0.24 % of the size."""
    order = Permutation(10_000, 3)(np.arange(10_000))
    distance = np.abs(np.diff(order)).mean() / 10_000
    assert abs(distance - 1 / 3) < 6 * 0.0024
