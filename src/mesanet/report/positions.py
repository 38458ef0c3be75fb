"""What follows from the sums and counts of each token position: the paper's metrics, and means over buckets.

Positions are counted from 1, as on paper: position k is the k-th token of a window, predicted from the k - 1 before it.
Arrays hold position k at index k - 1. NaN stands where there is no token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class Positions(NamedTuple):
    """Negative log likelihood and number of tokens by position."""

    sums: Floats
    """Over all windows that reach the position."""
    counts: Integers
    """How many windows reach it."""


class Curve(NamedTuple):
    """Values at some positions."""

    position: Floats
    """Where."""
    value: Floats
    """What."""


def positions_of(record: dict[str, Any]) -> Positions:
    """Read them out of an evaluation's record."""
    found = record["positions"]
    return Positions(np.array(found["sum"], dtype=np.float64), np.array(found["count"], dtype=np.int64))


def by_position(positions: Positions) -> Floats:
    """NLL_k: the mean over the windows that reach position k."""
    return _ratio(positions.sums, positions.counts)


def mean_so_far(positions: Positions) -> Floats:
    """Mean-so-far-NLL_:k: the mean over all tokens up to position k; windows that end before count in full."""
    return _ratio(positions.sums.cumsum(), positions.counts.cumsum())


def bucket_edges(length: int, count: int, scale: str) -> Integers:
    """Edges e of buckets of the positions e[i] + 1 to e[i + 1], evenly spaced or in equal ratios, each not empty."""
    if scale == "linear":
        edges = np.linspace(0, length, min(count, length) + 1).round()
    else:
        assert scale == "log", scale
        edges = np.concatenate([[0], np.geomspace(1, length, count).round() if count > 1 else [length]])
    return np.unique(edges.astype(np.int64))


def bucket_sums(positions: Positions, edges: Integers) -> Positions:
    """Sums and counts over the positions of each bucket."""
    totals = [np.concatenate([np.zeros(1, part.dtype), part.cumsum()]) for part in positions]
    return Positions(*(total[edges[1:]] - total[edges[:-1]] for total in totals))


def bucket_means(positions: Positions, count: int = 24, scale: str = "log") -> Curve:
    """The mean of the tokens in each bucket, placed at its middle on the same scale."""
    edges = bucket_edges(len(positions.sums), count, scale)
    sums = bucket_sums(positions, edges)
    return _drop_empty(Curve(_middles(edges, scale), _ratio(sums.sums, sums.counts)))


def difference(model: Positions, base: Positions) -> Floats:
    """Delta-NLL_k: a model's NLL_k less that of another on the same tokens."""
    _check_same(model, base)
    return by_position(model) - by_position(base)


def bucket_difference(model: Positions, base: Positions, count: int = 24, scale: str = "log") -> Curve:
    """The same as a mean over the tokens of each bucket."""
    _check_same(model, base)
    return bucket_means(Positions(model.sums - base.sums, model.counts), count, scale)


def log_spaced(curve: Floats, points: int = 200) -> Curve:
    """A curve over all positions at about so many, in equal ratios, the first and the last among them."""
    chosen = np.unique(np.geomspace(1, len(curve), min(points, len(curve))).round().astype(np.int64))
    return _drop_empty(Curve(chosen.astype(np.float64), curve[chosen - 1]))


def _check_same(model: Positions, base: Positions) -> None:
    if not np.array_equal(model.counts, base.counts):
        raise ValueError("the two evaluations are of different tokens: compare records of the same data and length")


def _middles(edges: Integers, scale: str) -> Floats:
    first, last = edges[:-1] + 1.0, edges[1:].astype(np.float64)
    return np.sqrt(first * last) if scale == "log" else (first + last) / 2


def _ratio(sums: Floats, counts: Integers) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(counts > 0, sums / counts, np.nan)


def _drop_empty(curve: Curve) -> Curve:
    kept = np.isfinite(curve.value)
    return Curve(curve.position[kept], curve.value[kept])
