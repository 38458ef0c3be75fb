"""Sequences of the training length out of documents, as in the paper's appendix on data.

A document that is longer than the training length T gives as many whole sequences as it has T tokens. What is left of
it, or a document that is shorter, is filled up with others in a seeded order, each behind a BOS, until the sequence is
full; what the last one has too much is dropped for this epoch. The next sequence begins with the next document. So a
sequence begins in mid-document only where a long document makes it. For validation nothing is dropped: what would be
begins the next sequence, behind a BOS, and no text stands twice.

All sequences of an epoch are visited in a seeded order. The batch of a step depends on (data, seed, step) alone, and
any of them can be asked for by itself. There is no loss on BOS.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mesanet.data.dataset import Split
from mesanet.data.permutation import Permutation
from mesanet.errors import UserError

IGNORED = -100
"""The target that has no loss."""

Integers = NDArray[np.int64]

# Orders are never stored. What is known of every so many documents is how many sequences they give; the documents of
# one block are packed by themselves, so that the sequences of a block can be found again from its documents alone.
BLOCK = 256
# Where documents are short, a block has as many more as make this many sequences, on average: what is special about the
# last sequence of a block is then a small part of all.
BLOCK_SEQUENCES = 32
CHUNK = BLOCK << 11

# These tell the orders of an epoch from each other; any two numbers would do, but others would give another order.
DOCUMENTS, SEQUENCES = 0, 13


class Batch(NamedTuple):
    """The rows of one step."""

    tokens: Integers
    """Inputs [B, T]."""
    targets: Integers
    """The token after each input, or IGNORED where that is BOS [B, T]."""


class Documents(Protocol):
    """Documents that lie end to end."""

    def __len__(self) -> int: ...

    def bounds(self, documents: Integers) -> Integers:
        """Where documents start and end [2, ...]."""
        ...

    def slice(self, start: int, end: int) -> NDArray[Any]:
        """The tokens in between, all of one document."""
        ...


class PackedSequences:
    """The endless row of a corpus's sequences, epoch after epoch; with `once`, of sequences that have all text once."""

    def __init__(self, documents: Documents, bos: int, sequence_length: int, seed: int, *, once: bool = False) -> None:
        self.sequence_length = sequence_length
        self._documents, self._bos, self._seed = documents, bos, seed
        self._once = once
        self._block = block_size(documents, sequence_length)
        self._whole = _WholeSequences(documents, sequence_length, self._block)
        self._epochs: dict[int, _Epoch] = {}
        self._firsts = [0]

    def epoch_sequences(self, number: int = 0) -> int:
        """How many sequences an epoch has; that depends a little on its order."""
        return self._first(number + 1) - self._first(number)

    def sequences(self, numbers: Integers) -> Integers:
        """Return the T+1 tokens of each of the numbered sequences [R, T+1]."""
        rows = np.full((len(numbers), self.sequence_length + 1), self._bos, dtype=np.int64)
        while self._firsts[-1] <= numbers.max(initial=0):
            self._first(len(self._firsts))
        epochs = np.searchsorted(self._firsts, numbers, side="right") - 1
        for number in np.unique(epochs).tolist():
            chosen, epoch = np.flatnonzero(epochs == number), self._epoch(number)
            found = epoch.shuffled(numbers[chosen] - self._firsts[number])
            whole = found < self._whole.count
            self._whole.fill(rows, chosen[whole], found[whole], self._bos)
            epoch.fill(rows, chosen[~whole], found[~whole] - self._whole.count, self._bos)
        return rows

    def _first(self, number: int) -> int:
        """The number of an epoch's first sequence."""
        while len(self._firsts) <= number:
            last = len(self._firsts) - 1
            self._firsts.append(self._firsts[last] + self._epoch(last).count)
        return self._firsts[number]

    def _epoch(self, number: int) -> _Epoch:
        if number not in self._epochs:
            # A batch lies in two epochs at most, and then they are neighbours, unless the corpus is tiny.
            self._epochs = {key: epoch for key, epoch in self._epochs.items() if abs(key - number) <= 1}
            self._epochs[number] = _Epoch(
                self._documents,
                self.sequence_length,
                self._whole.count,
                self._seed,
                number,
                block=self._block,
                once=self._once,
            )
        return self._epochs[number]


def block_size(documents: Documents, length: int) -> int:
    """How many documents make a block: a power of two of them, that depends on the data and the length alone."""
    count = len(documents)
    tokens = int(documents.bounds(np.array([count - 1]))[1, 0])
    block = BLOCK
    while block < count and block * tokens < BLOCK_SEQUENCES * length * count:
        block *= 2
    return block


class _WholeSequences:
    """The sequences that documents fill by themselves, in the order of the documents."""

    def __init__(self, documents: Documents, length: int, block: int) -> None:
        self._documents, self._length, self._block = documents, length, block
        sums = [np.zeros(1, np.int64)]
        for places in _chunks(len(documents), block):
            counts = self._counts(places)
            sums.append(np.add.reduceat(counts, np.arange(0, len(counts), block)))
        self._ends = np.cumsum(np.concatenate(sums))
        self.count = int(self._ends[-1])

    def fill(self, rows: Integers, places: Integers, numbers: Integers, bos: int) -> None:
        """Write the numbered ones into the rows at `places`."""
        for place, number in zip(places.tolist(), numbers.tolist(), strict=True):
            block = int(np.searchsorted(self._ends, number, side="right")) - 1
            documents = np.arange(block * self._block, min((block + 1) * self._block, len(self._documents)))
            ends = self._ends[block] + np.cumsum(self._counts(documents))
            inside = int(np.searchsorted(ends, number, side="right"))
            before = int(ends[inside - 1]) if inside else int(self._ends[block])
            begin = int(self._documents.bounds(documents[inside : inside + 1])[0, 0])
            # Input 0 of a document is its BOS, input i the token in front of token i.
            start = begin + (number - before) * self._length
            if start == begin:
                rows[place, 0] = bos
                rows[place, 1:] = self._documents.slice(start, start + self._length)
            else:
                rows[place] = self._documents.slice(start - 1, start + self._length)

    def _counts(self, documents: Integers) -> Integers:
        start, end = self._documents.bounds(documents)
        counts: Integers = (end - start) // self._length
        return counts


class _Epoch:
    """One epoch's order, and the sequences into which it packs what is too short to be one."""

    def __init__(
        self, documents: Documents, length: int, whole: int, seed: int, number: int, *, block: int, once: bool
    ) -> None:
        self._documents, self._length, self._block, self._once = documents, length, block, once
        self._order = Permutation(len(documents), seed, number, DOCUMENTS)
        pieces = (self._pieces(places)[0] for places in _chunks(len(documents), block))
        counts = [_count_sequences(sizes, length + 1, block, once=once) for sizes in pieces]
        self._ends = np.cumsum(np.concatenate([np.zeros(1, np.int64), *counts]))
        self.count = whole + int(self._ends[-1])
        self.shuffled = Permutation(self.count, seed, number, SEQUENCES)

    def fill(self, rows: Integers, places: Integers, numbers: Integers, bos: int) -> None:
        """Write the numbered ones of the packed sequences into the rows at `places`, so many that memory is bounded."""
        step = max(CHUNK // self._block, 1)
        for start in range(0, len(places), step):
            self._fill(rows, places[start : start + step], numbers[start : start + step], bos)

    def _fill(self, rows: Integers, places: Integers, numbers: Integers, bos: int) -> None:
        blocks = np.searchsorted(self._ends, numbers, side="right") - 1
        inside = numbers - self._ends[blocks]
        firsts = blocks[:, None] * self._block + np.arange(self._block)
        sizes, ends = self._pieces(firsts)
        for i, place in enumerate(places.tolist()):
            bounds = np.cumsum(sizes[i])
            begin = 0
            for _ in range(int(inside[i])):
                begin = int(_following(bounds, np.array(begin), self._length + 1, once=self._once))
            first = int(np.searchsorted(bounds, begin, side="right"))
            if cut := begin - int(bounds[first] - sizes[i, first]):
                # What the sequence before has not taken of a piece is one by itself, with a BOS of its own.
                sizes[i, first] += 1 - cut
            row = rows[place]
            filled = self._copy(row, 0, sizes[i, first:], ends[i, first:], bos)
            if not self._once:
                self._fill_on(row, filled, int(blocks[i]), first, bos)

    def _fill_on(self, row: Integers, filled: int, block: int, first: int, bos: int) -> None:
        """Go on with the blocks that follow, the last one by the first, until the row is full or all have been in it.

        What is left then, where there is so little text, stays BOS.
        """
        count = -(-len(self._documents) // self._block)
        for step in range(1, count + 1):
            if filled == len(row):
                return
            stop = self._block if step < count else first
            sizes, ends = self._pieces((block + step) % count * self._block + np.arange(stop))
            filled = self._copy(row, filled, sizes, ends, bos)

    def _copy(self, row: Integers, filled: int, sizes: Integers, ends: Integers, bos: int) -> int:
        """Copy pieces, given by their sizes with BOS and by where they end, behind what there is; return how far."""
        for size, end in zip(sizes.tolist(), ends.tolist(), strict=True):
            if filled == len(row):
                break
            if size == 0:
                continue
            row[filled] = bos
            count = min(size, len(row) - filled) - 1
            if count:
                row[filled + 1 : filled + 1 + count] = self._documents.slice(end - size + 1, end - size + 1 + count)
            filled += 1 + count
        return filled

    def _pieces(self, places: Integers) -> tuple[Integers, Integers]:
        """What whole sequences leave of the documents at `places` of the order: tokens with BOS, and where they end.

        Nothing has no tokens, not even BOS; and there is nothing beyond the last document.
        """
        last = len(self._documents) - 1
        start, end = self._documents.bounds(self._order(np.minimum(places, last)))
        rest = np.where(places <= last, (end - start) % self._length, 0)
        return np.where(rest > 0, rest + 1, 0), end


def _chunks(count: int, block: int) -> Iterator[Integers]:
    """The places of all documents, whole blocks at a time."""
    step = max(CHUNK // block, 1) * block
    for start in range(0, count, step):
        yield np.arange(start, min(start + step, count))


def _count_sequences(sizes: Integers, tokens: int, block: int, *, once: bool) -> Integers:
    """How many sequences of so many tokens the pieces of each block begin."""
    blocks = -(-len(sizes) // block)
    ends = np.cumsum(np.concatenate([sizes, np.zeros(blocks * block - len(sizes), np.int64)]))
    limits = ends.reshape(blocks, block)[:, -1]
    begins = np.concatenate([[0], limits[:-1]])
    counts = np.zeros(blocks, dtype=np.int64)
    while (going := np.flatnonzero(begins < limits)).size:
        counts[going] += 1
        begins[going] = np.minimum(_following(ends, begins[going], tokens, once=once), limits[going])
    return counts


def _following(ends: Integers, begins: Integers, tokens: int, *, once: bool) -> Integers:
    """Where the next sequence begins among pieces that end at `ends`: with the first piece that is not in this one.

    With `once` it is where this one ends; a sequence that begins inside a piece has one token less of it, for its BOS.
    """
    following: Integers
    if once:
        whole = (begins == 0) | (ends[np.searchsorted(ends, begins)] == begins)
        following = begins + tokens - 1 + whole
    else:
        following = ends[np.minimum(np.searchsorted(ends, begins + tokens), len(ends) - 1)]
    return following


class Batches:
    """The batches of training: the same for every model, every number of processes and after every resume."""

    def __init__(self, split: Split, bos: int, *, sequence_length: int, batch_size: int, seed: int) -> None:
        _check_not_empty(split)
        epoch_tokens = split.tokens + len(split)
        if epoch_tokens <= sequence_length:
            raise UserError(
                f"sequence_length {sequence_length} is longer than the {split.name} split of {split.folder}, which has "
                f"{epoch_tokens} tokens with BOS; prepare more data or take shorter sequences"
            )
        self._sequences = PackedSequences(split, bos, sequence_length, seed)
        self._bos = bos
        self.batch_size = batch_size
        self.sequence_length = sequence_length

    def batch(self, step: int, rank: int = 0, world_size: int = 1) -> Batch:
        """Return the rows of step `step` that process `rank` of `world_size` works on, in order of rank."""
        if self.batch_size % world_size:
            raise UserError(f"batch_size {self.batch_size} can't be shared evenly by {world_size} processes")
        rows = self.batch_size // world_size
        first = step * self.batch_size + rank * rows
        return as_batch(self._sequences.sequences(np.arange(first, first + rows)), self._bos)


def as_batch(sequences: Integers, bos: int) -> Batch:
    """Split T+1 tokens into T inputs and T targets without loss on BOS."""
    targets = sequences[:, 1:]
    return Batch(np.ascontiguousarray(sequences[:, :-1]), np.where(targets == bos, IGNORED, targets))


def packed_windows(split: Split, bos: int, *, sequence_length: int, batch_size: int, seed: int = 0) -> Iterator[Batch]:
    """Go once through a split packed as in training, for validation: every token is a target once, BOS never.

    The last batch may have fewer rows, and some sequences end with BOS, without loss.
    """
    _check_not_empty(split)
    packed = PackedSequences(split, bos, sequence_length, seed, once=True)
    count = packed.epoch_sequences()
    for first in range(0, count, batch_size):
        yield as_batch(packed.sequences(np.arange(first, min(first + batch_size, count))), bos)


def _check_not_empty(split: Split) -> None:
    if len(split) == 0:
        raise UserError(f"the {split.name} split of {split.folder} is empty; prepare with another validation fraction")
