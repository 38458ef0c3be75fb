"""Multi-query associative recall (MQAR): pairs of a key and a value, and later each key again, to be answered.

The pairs fill the first 2 * pairs positions. What is left is cut into slots of two tokens; each key returns as the
first token of a slot of its own, and early slots are much more likely than late ones, as distances between words
are in text. The target at that position is the key's value; every other position has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mesanet.config import check_fields, check_in_range, check_positive
from mesanet.data.packing import IGNORED, Integers

Floats = NDArray[np.float64]

FILLER = 0
"""The token that stands where nothing is said."""


@dataclass(frozen=True, kw_only=True)
class RecallTask:
    """What the sequences of multi-query associative recall look like."""

    pairs: int = 8
    """Pairs of a key and a value in a sequence."""
    length: int = 64
    """Tokens in a sequence; at least four for each pair."""
    vocabulary: int = 8192
    """Number of token ids: 0 is the filler, the lower half are keys, the upper half values."""
    slot_power: float = 0.01
    """Slot i is drawn with a weight of i ** (slot_power - 1): 1 draws them evenly, small values prefer early ones."""
    random_filler: bool = False
    """Fill what is left with random tokens of the whole vocabulary, rather than with the filler."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_positive("pairs", self.pairs)
        check_in_range("length", self.length, low=4 * self.pairs)
        # As many keys as pairs have to differ, and the filler takes the first id of their half.
        check_in_range("vocabulary", self.vocabulary, low=2 * self.pairs + 2)

    @property
    def slots(self) -> int:
        """Slots of two tokens after the pairs."""
        return (self.length - 2 * self.pairs) // 2


class RecallBatch(NamedTuple):
    """Token ids and what they are to be answered with."""

    tokens: Tensor
    """[B, T]"""
    targets: Tensor
    """[B, T] the value where a key returns, and -100 elsewhere."""


def recall_batch(task: RecallTask, rows: int, *, seed: int, step: int) -> RecallBatch:
    """Batch number `step` of the stream `seed`: a pure function of its arguments."""
    random = np.random.default_rng([seed, step])
    half = task.vocabulary // 2
    keys = 1 + _distinct(random, rows, np.ones(half - 1), task.pairs)
    values = half + _distinct(random, rows, np.ones(task.vocabulary - half), task.pairs)
    weights = np.arange(1, task.slots + 1, dtype=np.float64) ** (task.slot_power - 1)
    places = 2 * task.pairs + 2 * _distinct(random, rows, weights, task.pairs)

    tokens = np.full((rows, task.length), FILLER, dtype=np.int64)
    if task.random_filler:
        tokens = random.integers(task.vocabulary, size=tokens.shape)
    targets = np.full((rows, task.length), IGNORED, dtype=np.int64)
    tokens[:, 0 : 2 * task.pairs : 2] = keys
    tokens[:, 1 : 2 * task.pairs : 2] = values
    np.put_along_axis(tokens, places, keys, axis=1)
    np.put_along_axis(targets, places, values, axis=1)
    return RecallBatch(torch.from_numpy(tokens), torch.from_numpy(targets))


def recall_accuracy(logits: Tensor, targets: Tensor) -> float:
    """Share of the queries [B, T] whose value has the highest of the logits [B, T, vocabulary]."""
    asked = targets != IGNORED
    return float((logits.argmax(-1) == targets)[asked].double().mean())


def _distinct(random: np.random.Generator, rows: int, weights: Floats, count: int) -> Integers:
    """[rows, count] places, in every row drawn one after the other without replacement, and then shuffled.

    The places of the largest values of log weight + Gumbel noise, from the largest down, are such a draw. Shuffled,
    because the heaviest places come first, and that would tell where to look for them.
    """
    scores = np.log(weights) + random.gumbel(size=(rows, len(weights)))
    return random.permuted(np.argsort(-scores, axis=1)[:, :count], axis=1)
