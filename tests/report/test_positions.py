from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesanet.report.positions import (
    Positions,
    bucket_difference,
    bucket_edges,
    bucket_means,
    bucket_sums,
    by_position,
    difference,
    log_spaced,
    mean_so_far,
)


@given(st.integers(1, 5000), st.integers(1, 40), st.sampled_from(["log", "linear"]))
def test_buckets_cover_every_position_once(length: int, count: int, scale: str) -> None:
    edges = bucket_edges(length, count, scale)
    assert edges[0] == 0
    assert edges[-1] == length
    assert (np.diff(edges) > 0).all()
    assert len(edges) <= count + 1


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 9)), min_size=1, max_size=300), st.integers(1, 30))
def test_buckets_keep_the_total(pairs: list[tuple[float, int]], count: int) -> None:
    positions = Positions(np.array([s for s, _ in pairs]), np.array([c for _, c in pairs]))
    for scale in ("log", "linear"):
        sums = bucket_sums(positions, bucket_edges(len(pairs), count, scale))
        # Prefix sums in float64 of at most 300 numbers below 20: the error is below 300 * 6000 * 1e-16.
        assert sums.sums.sum() == pytest.approx(positions.sums.sum(), abs=1e-9)
        assert sums.counts.sum() == positions.counts.sum()
    assert mean_so_far(positions)[-1] == pytest.approx(positions.sums.sum() / positions.counts.sum(), rel=1e-12)


def test_one_bucket_per_position_is_the_mean_by_position() -> None:
    positions = Positions(np.array([6.0, 4.0, 1.0]), np.array([3, 2, 1]))
    assert by_position(positions).tolist() == [2, 2, 1]
    curve = bucket_means(positions, count=3, scale="linear")
    assert curve.position.tolist() == [1, 2, 3]
    assert curve.value.tolist() == [2, 2, 1]
    assert mean_so_far(positions).tolist() == [2, 2, 11 / 6]


def test_positions_without_tokens_are_left_out() -> None:
    positions = Positions(np.array([6.0, 0.0, 1.0]), np.array([3, 0, 1]))
    assert np.isnan(by_position(positions)[1])
    assert bucket_means(positions, count=3, scale="linear").position.tolist() == [1, 3]
    assert log_spaced(by_position(positions)).position.tolist() == [1, 3]


def test_only_the_same_tokens_can_be_compared() -> None:
    ours, base = Positions(np.ones(3), np.ones(3, int)), Positions(np.zeros(3), np.ones(3, int))
    assert difference(ours, base).tolist() == [1, 1, 1]
    assert bucket_difference(ours, base, count=2).value.tolist() == [1, 1]
    with pytest.raises(ValueError, match="different tokens"):
        difference(ours, base._replace(counts=np.array([1, 1, 2])))
