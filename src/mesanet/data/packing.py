"""Sequences of the training length out of documents, so that the batch of a step depends on (data, seed, step) alone.

The documents of an epoch, in a seeded order and each behind a BOS, form one long stream; epoch follows epoch without
a gap. Sequence i covers the stream's tokens from i*T on, and the next one as its last target. The sequences that
start in one epoch are visited in a seeded order of their own, so that the parts of a long document end up in
different batches. Every token is an input once an epoch. There is no loss on BOS.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mesanet.data.dataset import Split
from mesanet.data.permutation import Permutation
from mesanet.errors import UserError

IGNORED = -100
"""The target that has no loss."""

Integers = NDArray[np.int64]

# The stream's order is never stored. Where every so many-th document begins is, and the ones between are found again.
BUCKET = 64
CHUNK = BUCKET << 13


class Batch(NamedTuple):
    """The rows of one step."""

    tokens: Integers
    """Inputs [B, T]."""
    targets: Integers
    """The token after each input, or IGNORED where that is BOS [B, T]."""


class Window(NamedTuple):
    """A stretch of one document, for evaluation."""

    document: int
    """Number of the document in its split."""
    start: int
    """Position of the first input in the document; BOS has position 0."""
    tokens: Integers
    """Inputs, at most as many as asked for [T]."""
    targets: Integers
    """The token after each input [T]."""


class PackedStream:
    """The endless stream of a split's documents, and any sequence of it."""

    def __init__(self, split: Split, bos: int, sequence_length: int, seed: int) -> None:
        self.epoch_tokens = split.tokens + len(split)
        """Tokens of an epoch, each document's BOS included."""
        if len(split) == 0:
            raise UserError(
                f"the {split.name} split of {split.folder} is empty; prepare with another validation fraction"
            )
        if self.epoch_tokens <= sequence_length:
            raise UserError(
                f"sequence_length {sequence_length} is longer than the {split.name} split of {split.folder}, which has "
                f"{self.epoch_tokens} tokens with BOS; prepare more data or take shorter sequences"
            )
        self.sequence_length = sequence_length
        self._split, self._bos, self._seed = split, bos, seed
        self._epochs: dict[int, _Epoch] = {}
        # Enough documents, nearly always, to fill a sequence that starts anywhere in a bucket.
        mean = self.epoch_tokens / len(split)
        self._window = BUCKET + min(2 * int(sequence_length / mean) + 8, 1 << 12)

    def stretch(self, starts: Integers) -> Integers:
        """Return the T+1 tokens of the stream from each of `starts` on [R, T+1]."""
        rows = np.empty((len(starts), self.sequence_length + 1), dtype=np.int64)
        epochs = starts // self.epoch_tokens
        for number in np.unique(epochs).tolist():
            chosen = np.flatnonzero(epochs == number)
            offsets = starts[chosen] - number * self.epoch_tokens
            places, begins, bounds = self._epoch(number).window(offsets, self._window)
            for i, row in enumerate(chosen.tolist()):
                found = zip(begins[i].tolist(), bounds[0, i].tolist(), bounds[1, i].tolist(), strict=True)
                filled = self._fill(rows[row], 0, int(offsets[i]), found)
                self._fill_on(rows[row], filled, number, int(places[i]) + begins.shape[1])
        return rows

    def sequences(self, numbers: Integers) -> Integers:
        """Return the T+1 tokens of each of the numbered sequences of training [R, T+1]."""
        return self.stretch(self._shuffled(numbers) * self.sequence_length)

    def _shuffled(self, numbers: Integers) -> Integers:
        """Permute the numbers of sequences within the epoch that they start in."""
        epochs = numbers * self.sequence_length // self.epoch_tokens
        shuffled = np.empty_like(numbers)
        for number in np.unique(epochs).tolist():
            first, end = (-(-edge * self.epoch_tokens // self.sequence_length) for edge in (number, number + 1))
            chosen = epochs == number
            shuffled[chosen] = first + Permutation(end - first, self._seed, number, 1)(numbers[chosen] - first)
        return shuffled

    def _epoch(self, number: int) -> _Epoch:
        if number not in self._epochs:
            # A batch lies in two epochs at most, and then they are neighbours, unless the corpus is tiny.
            self._epochs = {key: epoch for key, epoch in self._epochs.items() if abs(key - number) <= 1}
            self._epochs[number] = _Epoch(self._split, self._seed, number)
        return self._epochs[number]

    def _fill(self, row: Integers, filled: int, offset: int, documents: Any) -> int:
        """Copy what the documents, given as (where it begins, start, end), hold from `offset` on; return how far."""
        for begin, start, end in documents:
            inside = offset - begin
            if inside > end - start:
                continue
            if inside == 0:
                row[filled] = self._bos
                filled, offset, inside = filled + 1, offset + 1, 1
            count = min(end - start - inside + 1, len(row) - filled)
            first = start + inside - 1
            row[filled : filled + count] = self._split.slice(first, first + count) if count else ()
            filled, offset = filled + count, offset + count
            if filled == len(row):
                break
        return filled

    def _fill_on(self, row: Integers, filled: int, number: int, place: int) -> None:
        """Fill the rest of a row with the documents from `place` on, through the epochs that follow."""
        while filled < len(row):
            if place >= len(self._split):
                number, place = number + 1, 0
            places = np.arange(place, min(place + BUCKET, len(self._split)))
            begins, bounds = self._epoch(number).documents(places)
            found = zip(begins.tolist(), *bounds.tolist(), strict=True)
            filled = self._fill(row, filled, 0, found)
            place += len(places)


class _Epoch:
    """The order of the documents in one epoch."""

    def __init__(self, split: Split, seed: int, number: int) -> None:
        self._split = split
        self._order = Permutation(len(split), seed, number, 0)
        sums = []
        for start in range(0, len(split), CHUNK):
            places = np.arange(start, min(start + CHUNK, len(split)))
            sums.append(np.add.reduceat(self._sizes(self._bounds(places)), np.arange(0, len(places), BUCKET)))
        self._begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(sums))])

    def documents(self, places: Integers) -> tuple[Integers, Integers]:
        """Return the bounds of the documents at `places` that follow each other, and where each begins after them."""
        bounds = self._bounds(places)
        sizes = self._sizes(bounds)
        return np.cumsum(sizes) - sizes, bounds

    def window(self, offsets: Integers, count: int) -> tuple[Integers, Integers, Integers]:
        """For each offset in the epoch's stream, return the documents around it that come first in their bucket.

        Gives the place of the first [R], where the documents begin in the stream [R, count], and their bounds
        [2, R, count]. Beyond the last document come empty ones, which begin in front of everything.
        """
        buckets = np.searchsorted(self._begins, offsets, side="right") - 1
        first = buckets * BUCKET
        places = first[:, None] + np.arange(min(count, len(self._split)))
        inside = places < len(self._split)
        bounds = self._bounds(np.minimum(places, len(self._split) - 1))
        sizes = self._sizes(bounds)
        begins = self._begins[buckets][:, None] + np.cumsum(sizes, axis=1) - sizes
        return first, np.where(inside, begins, -1), np.where(inside, bounds, 0)

    def _bounds(self, places: Integers) -> Integers:
        return self._split.bounds(self._order(places))

    @staticmethod
    def _sizes(bounds: Integers) -> Integers:
        sizes: Integers = bounds[1] - bounds[0] + 1
        return sizes


class Batches:
    """The batches of training: the same for every model, every number of processes and after every resume."""

    def __init__(self, split: Split, bos: int, *, sequence_length: int, batch_size: int, seed: int) -> None:
        self._stream = PackedStream(split, bos, sequence_length, seed)
        self._bos = bos
        self.batch_size = batch_size
        self.sequence_length = sequence_length

    def batch(self, step: int, rank: int = 0, world_size: int = 1) -> Batch:
        """Return the rows of step `step` that process `rank` of `world_size` works on, in order of rank."""
        if self.batch_size % world_size:
            raise UserError(f"batch_size {self.batch_size} can't be shared evenly by {world_size} processes")
        rows = self.batch_size // world_size
        first = step * self.batch_size + rank * rows
        return as_batch(self._stream.sequences(np.arange(first, first + rows)), self._bos)

    def epochs(self, steps: int) -> float:
        """Return how often `steps` steps go through the data."""
        return steps * self.batch_size * self.sequence_length / self._stream.epoch_tokens


def as_batch(stretch: Integers, bos: int) -> Batch:
    """Split T+1 tokens into T inputs and T targets without loss on BOS."""
    targets = stretch[:, 1:]
    return Batch(np.ascontiguousarray(stretch[:, :-1]), np.where(targets == bos, IGNORED, targets))


def packed_windows(split: Split, bos: int, *, sequence_length: int, batch_size: int, seed: int = 0) -> Iterator[Batch]:
    """Go once through a split packed as in training, for validation: every token is a target once, BOS never.

    The last sequence is filled up with BOS, without loss; the last batch may have fewer rows.
    """
    stream = PackedStream(split, bos, min(sequence_length, split.tokens + len(split) - 1), seed)
    count = -(-(stream.epoch_tokens - 1) // sequence_length)
    for first in range(0, count, batch_size):
        numbers = np.arange(first, min(first + batch_size, count))
        rows = stream.stretch(numbers * sequence_length)
        rows = np.pad(rows, ((0, 0), (0, sequence_length + 1 - rows.shape[1])), constant_values=bos)
        beyond = numbers[:, None] * sequence_length + np.arange(sequence_length + 1) >= stream.epoch_tokens
        yield as_batch(np.where(beyond, bos, rows), bos)


def document_windows(
    split: Split, bos: int, *, length: int, at_least: int = 0, documents: Integers | None = None
) -> Iterator[Window]:
    """Go through a split's documents one by one, each behind a BOS, in windows of at most `length` tokens.

    Each token of a document is a target once; a window goes on where the one before it ended, so that a state carried
    along sees the whole document. Documents of fewer than `at_least` tokens are left out.
    """
    for document in range(len(split)) if documents is None else documents.tolist():
        tokens = split[document]
        if len(tokens) < at_least:
            continue
        for start in range(0, len(tokens), length):
            targets = tokens[start : start + length].astype(np.int64)
            before = bos if start == 0 else int(tokens[start - 1])
            yield Window(document, start, np.concatenate([[before], targets[:-1]]), targets)
