"""A seeded order of n things that takes no memory: any place in it can be asked for by itself."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

ROUNDS = 8


class Permutation:
    """A bijection of 0..size-1, given by a seed: eight rounds of a Feistel network on a grid, walking its cycles.

    It is ours down to the last bit, so the order of training never changes with a version of another library.
    """

    def __init__(self, size: int, *seed: int) -> None:
        assert 0 < size < 1 << 62, size
        self.size = size
        self._rows = math.isqrt(size - 1) + 1
        self._columns = -(-size // self._rows)
        keys = [fold(*seed, step) for step in range(ROUNDS)]
        self._keys = [np.uint64(key) for key in keys]

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what stands at `places`, an array of any shape."""
        values = self._round_trip(places.astype(np.uint64))
        # The grid is larger than the size by less than a row: the few values outside go through again until inside.
        outside = values >= self.size
        while outside.any():
            values[outside] = self._round_trip(values[outside])
            outside = values >= self.size
        return values.astype(np.int64)

    def _round_trip(self, values: Words) -> Words:
        columns = np.uint64(self._columns)
        row, column = values // columns, values % columns
        for step, key in enumerate(self._keys):
            if step % 2:
                column = _add(column, row ^ key, self._columns)
            else:
                row = _add(row, column ^ key, self._rows)
        return row * columns + column


def mix(values: Words) -> Words:
    """Scramble 64-bit words: the finaliser of splitmix64, a bijection in which every bit depends on every other."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def fold(*numbers: int) -> int:
    """Fold whole numbers, in their order, into one well-mixed 64-bit number."""
    word = np.zeros(1, dtype=np.uint64)
    for number in numbers:
        word = mix((word + np.uint64(0x9E3779B97F4A7C15)) ^ np.uint64(number & (2**64 - 1)))
    return int(word[0])


def _add(values: Words, source: Words, modulus: int) -> Words:
    """Add to `values`, below `modulus`, a number below `modulus` that is drawn from `source`."""
    # A multiplication and a shift bring 32 random bits below the modulus without the slow division.
    drawn = ((mix(source) >> np.uint64(32)) * np.uint64(modulus)) >> np.uint64(32)
    total = values + drawn
    return np.where(total >= modulus, total - np.uint64(modulus), total)
