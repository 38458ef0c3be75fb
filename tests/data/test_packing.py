"""Packing: the batch of a step depends on (data, seed, step) alone, and fills up short documents with others."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.data.conftest import config, write_lines

from mesanet.config.data import DataConfig
from mesanet.data import (
    IGNORED,
    Batches,
    Dataset,
    PackedSequences,
    make_batches,
    open_dataset,
    packed_windows,
    prepare,
)
from mesanet.data.packing import BLOCK, block_size
from mesanet.data.permutation import Permutation
from mesanet.errors import UserError

BOS = 256


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Nine short documents and one long one, over several shards."""
    folder = tmp_path_factory.mktemp("tiny")
    texts = [chr(ord("a") + i) * (i + 1) for i in range(9)] + ["0123456789" * 20]
    source = write_lines(folder / "tiny.jsonl", texts)
    prepare(config(source, out=folder / "out", shard_tokens=20, validation_fraction=0.0), quiet=True)
    return open_dataset(folder / "out")


def _packed_slowly(dataset: Dataset, length: int, seed: int, epoch: int) -> tuple[list[list[int]], list[list[int]]]:
    """The sequences of an epoch by the words of the paper, one document at a time: whole ones, and filled up ones."""
    split = dataset.train
    documents = [[BOS, *split[number].tolist()] for number in range(len(split))]
    whole = [
        document[start : start + length + 1]
        for document in documents
        for start in range(0, len(document) - length, length)
    ]
    order = Permutation(len(split), seed, epoch, 0)(np.arange(len(split))).tolist()
    pieces = []
    for place, number in enumerate(order):
        rest = (len(documents[number]) - 1) % length
        pieces += [(place // BLOCK, [BOS, *documents[number][-rest:]])] if rest else []
    filled = []
    place = 0
    while place < len(pieces):
        block, row, others = pieces[place][0], [], 0
        begun = place
        while len(row) < length + 1 and others < len(pieces):
            row += pieces[(begun + others) % len(pieces)][1]
            others += 1
        # A new sequence begins with the first document that is not in this one; every block of documents by itself.
        while place < len(pieces) and pieces[place][0] == block and place < begun + others:
            place += 1
        filled.append((row + [BOS] * length)[: length + 1])
    return whole, filled


def _batches(dataset: Dataset, length: int, size: int = 4, seed: int = 0) -> Batches:
    return Batches(dataset.train, BOS, sequence_length=length, batch_size=size, seed=seed)


def _epochs(packed: PackedSequences, count: int) -> list[list[tuple[int, ...]]]:
    edges = np.cumsum([0, *(packed.epoch_sequences(number) for number in range(count))]).tolist()
    return [list(map(tuple, packed.sequences(np.arange(*edge)).tolist())) for edge in pairwise(edges)]


@given(length=st.integers(1, 254), seed=st.integers(0, 10**9))
def test_sequences_are_filled_up_as_the_paper_says(tiny: Dataset, length: int, seed: int) -> None:
    packed = PackedSequences(tiny.train, BOS, length, seed)
    for epoch, found in enumerate(_epochs(packed, 3)):
        whole, filled = _packed_slowly(tiny, length, seed, epoch)
        assert Counter(found) == Counter(map(tuple, whole + filled))


@pytest.mark.parametrize("length", [1, 7, 64, 1000])
@pytest.mark.parametrize("block", [1, 8, 256])
def test_blocks_of_documents(dataset: Dataset, length: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More documents than one block holds, documents in many shards, and more blocks than are counted at once."""
    monkeypatch.setattr("mesanet.data.packing.BLOCK", block)
    monkeypatch.setattr("mesanet.data.packing.BLOCK_SEQUENCES", 0)
    monkeypatch.setattr("tests.data.test_packing.BLOCK", block)
    monkeypatch.setattr("mesanet.data.packing.CHUNK", 3 * block)
    for epoch, found in enumerate(_epochs(PackedSequences(dataset.train, BOS, length, 3), 2)):
        whole, filled = _packed_slowly(dataset, length, 3, epoch)
        assert Counter(found) == Counter(map(tuple, whole + filled))


def test_a_sequence_begins_with_a_document_or_inside_a_long_one(dataset: Dataset) -> None:
    length = 40
    split = dataset.train
    inner = {
        tuple(split[number][start - 1 : start + length].tolist())
        for number in range(len(split))
        for start in range(length, len(split[number]) - length + 1, length)
    }
    rows = PackedSequences(split, BOS, length, 0).sequences(np.arange(400)).tolist()
    begun = [row for row in rows if row[0] == BOS]
    assert len(begun) > 100
    assert all(tuple(row) in inner for row in rows if row[0] != BOS)


class Numbered:
    """Documents of these sizes, in which every token is another one."""

    def __init__(self, sizes: list[int]) -> None:
        self.ends = np.cumsum(sizes)

    def __len__(self) -> int:
        return len(self.ends)

    def bounds(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.stack([np.concatenate([[0], self.ends])[documents], self.ends[documents]])

    def slice(self, start: int, end: int) -> NDArray[np.int64]:
        return np.arange(start, end)


@pytest.mark.parametrize("length", [5, 40])
def test_only_ends_of_documents_are_dropped_and_not_always_the_same(length: int) -> None:
    """One at the end of each sequence at most; what one epoch cuts off comes in another, as the order is another."""
    documents = Numbered(np.random.default_rng(0).integers(1, 41, 600).tolist())
    packed = PackedSequences(documents, -1, length, 0)
    count, always = int(documents.ends[-1]), set(range(int(documents.ends[-1])))
    dropped = []
    for epoch in _epochs(packed, 30):
        # The token in front of a sequence is no target, but comes as one at the end of the sequence before.
        found = Counter(token for row in epoch for token in row[1:] if token >= 0)
        # Only the last sequence of a block of documents goes on with some that come in another one as well.
        assert sum(times - 1 for times in found.values()) <= -(-len(documents) // BLOCK) * length
        dropped.append(set(range(count)) - found.keys())
        cut = [token for token in dropped[-1] if token - 1 not in dropped[-1]]
        assert 0 < len(cut) <= len(epoch)
        assert all(token + 1 in dropped[-1] or token + 1 in documents.ends for token in dropped[-1])
        always &= dropped[-1]
    assert dropped[0] != dropped[1]
    assert not always


@pytest.mark.parametrize(
    ("sizes", "share"),
    [
        ([2000] * 3000, 0.49),
        ([1500] * 3000, 0.32),
        (np.random.default_rng(0).geometric(1 / 1000, 6000).tolist(), 0.15),
        (np.random.default_rng(0).geometric(1 / 100, 20_000).tolist(), 0.05),
    ],
    ids=["2000", "1500", "around 1000", "around 100"],
)
def test_how_much_is_dropped(sizes: list[int], share: float) -> None:
    """At the training length of 2048, as the guide says: a part of each document that does not fit behind others."""
    documents = Numbered(sizes)
    packed = PackedSequences(documents, -1, 2048, 0)
    seen = packed.sequences(np.arange(packed.epoch_sequences()))[:, 1:]
    dropped = 1 - len(np.unique(seen[seen >= 0])) / int(documents.ends[-1])
    assert round(dropped, 2) == share


@pytest.mark.parametrize(("count", "length"), [(5000, 8192), (20_000, 2048)])
def test_short_documents_fill_long_sequences(count: int, length: int) -> None:
    """A block of documents is many sequences long, however short they are: what ends with it is a small part of all."""
    documents = Numbered(np.random.default_rng(1).integers(1, 40, count).tolist())
    tokens = int(documents.ends[-1])
    blocks = -(-count // block_size(documents, length))
    once = PackedSequences(documents, -1, length, 0, once=True)
    # A sequence has T tokens and the first of the next, each document a BOS, and one that is cut a second one.
    needed = -(-(tokens + count + once.epoch_sequences()) // length)
    assert once.epoch_sequences() <= needed + blocks
    rows = once.sequences(np.arange(once.epoch_sequences()))
    assert sorted(rows[:, 1:][rows[:, 1:] >= 0].tolist()) == list(range(tokens))
    assert (rows[:, 1:] >= 0).any(axis=0).all()
    found = PackedSequences(documents, -1, length, 0)
    assert found.epoch_sequences() <= needed + blocks
    # Nothing comes twice but what fills up the last sequence of a block.
    seen = found.sequences(np.arange(found.epoch_sequences()))
    assert (seen >= 0).sum() <= tokens + blocks * length + found.epoch_sequences()


def test_blocks_of_ordinary_documents_are_small() -> None:
    """Their size decides the order of all batches, and must not change for data that don't need it."""
    assert block_size(Numbered([300] * 5000), 2048) == BLOCK
    assert block_size(Numbered([2000] * 5000), 2048) == BLOCK
    assert block_size(Numbered([20] * 100), 2048) == BLOCK
    assert block_size(Numbered([32] * 5000), 2048) == 2048


def test_sequences_that_follow_each_other_are_of_different_documents(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "data.jsonl", ["".join(chr(65 + i % 26) * 10 for i in range(1000))])
    prepare(config(source, out=tmp_path / "out", validation_fraction=0.0), quiet=True)
    packed = PackedSequences(open_dataset(tmp_path / "out").train, BOS, 10, 0)
    letters = packed.sequences(np.arange(1000))[:, 5]
    assert np.mean(np.diff(letters) % 26 == 1) < 0.1


def test_a_batch_is_a_function_of_seed_and_step(dataset: Dataset, prepared: Path) -> None:
    first, again = _batches(dataset, 32), _batches(open_dataset(prepared), 32)
    forwards = [first.batch(step) for step in range(50)]
    for step in reversed(range(50)):
        tokens, targets = again.batch(step)
        assert np.array_equal(tokens, forwards[step].tokens)
        assert np.array_equal(targets, forwards[step].targets)
    assert not np.array_equal(first.batch(0).tokens, _batches(dataset, 32, seed=1).batch(0).tokens)


@pytest.mark.parametrize("world_size", [1, 2, 3, 6, 12])
@pytest.mark.parametrize("step", [0, 1, 17, 1000])
def test_processes_share_one_batch(dataset: Dataset, world_size: int, step: int) -> None:
    batches = _batches(dataset, 40, size=12)
    whole = batches.batch(step)
    parts = [batches.batch(step, rank, world_size) for rank in range(world_size)]
    for name in ("tokens", "targets"):
        assert np.array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(whole, name))


def test_rows_do_not_depend_on_the_size_of_a_batch(dataset: Dataset) -> None:
    small, large = _batches(dataset, 20, size=3), _batches(dataset, 20, size=12)
    rows = np.concatenate([small.batch(step).tokens for step in range(4)])
    assert np.array_equal(rows, large.batch(0).tokens)


def test_targets_are_the_next_tokens_and_never_bos(dataset: Dataset) -> None:
    seen = 0
    for step in range(20):
        tokens, targets = _batches(dataset, 100).batch(step)
        assert tokens.dtype == targets.dtype == np.int64
        assert tokens.shape == targets.shape == (4, 100)
        following, expected = tokens[:, 1:], targets[:, :-1]
        assert np.array_equal(expected, np.where(following == BOS, IGNORED, following))
        assert BOS not in targets
        seen += int((following == BOS).sum())
    assert seen > 0


@pytest.mark.parametrize("length", [255, 10_000])
def test_a_sequence_longer_than_the_corpus_is_refused(tiny: Dataset, length: int) -> None:
    """45 letters, 200 digits and 10 BOS: a sequence of 254 and its last target just fit."""
    _batches(tiny, 254)
    with pytest.raises(UserError, match=rf"sequence_length {length} is longer than the train split .* 255 tokens"):
        _batches(tiny, length)


def test_an_empty_split_is_refused(tiny: Dataset) -> None:
    with pytest.raises(UserError, match=r"the validation split .* is empty"):
        next(packed_windows(tiny.validation, BOS, sequence_length=8, batch_size=2))


def test_processes_have_to_share_evenly(dataset: Dataset) -> None:
    with pytest.raises(UserError, match="batch_size 4 can't be shared evenly by 3 processes"):
        _batches(dataset, 8).batch(0, 0, 3)


@pytest.mark.parametrize("length", [1, 5, 17, 254, 255, 4096])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("block", [2, 256])
def test_validation_has_every_token_once(
    tiny: Dataset, length: int, batch_size: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesanet.data.packing.BLOCK", block)
    monkeypatch.setattr("mesanet.data.packing.BLOCK_SEQUENCES", 0)
    batches = list(packed_windows(tiny.train, BOS, sequence_length=length, batch_size=batch_size, seed=2))
    assert all(batch.tokens.shape[1] == length for batch in batches)
    rows = np.concatenate([np.concatenate([batch.tokens[:, :1], batch.targets], axis=1) for batch in batches])
    found = [token for row in rows.tolist() for token in row[1:] if token != IGNORED]
    offered = [token for number in range(len(tiny.train)) for token in tiny.train[number].tolist()]
    assert Counter(found) == Counter(offered)
    # Letters follow letters of their own document, and digits each other, unless a BOS is in between.
    for row in rows.tolist():
        inner = [pair for pair in pairwise(row) if min(pair) >= 0 and BOS not in pair]
        assert all(chr(a).isdigit() == chr(b).isdigit() and (chr(a).isdigit() or a == b) for a, b in inner)


@pytest.mark.parametrize("length", [3, 17])
def test_validation_is_in_a_seeded_order(tiny: Dataset, length: int) -> None:
    def rows(seed: int) -> list[list[int]]:
        batches = packed_windows(tiny.train, BOS, sequence_length=length, batch_size=2, seed=seed)
        return [row for batch in batches for row in batch.tokens.tolist()]

    assert rows(0) == rows(0) != rows(1)


def test_text_shorter_than_a_sequence_is_validated_whole(tiny: Dataset) -> None:
    """Nothing stands twice in a sequence: what is missing is BOS, without loss."""
    (batch,) = packed_windows(tiny.train, BOS, sequence_length=4096, batch_size=8)
    found = Counter(batch.targets[batch.targets != IGNORED].tolist())
    assert found == Counter(token for number in range(10) for token in tiny.train[number].tolist())


def test_batches_from_a_config(dataset: Dataset, prepared: Path) -> None:
    settings = DataConfig(path=prepared, sequence_length=16, batch_size=2, seed=9)
    made = make_batches(dataset, settings)
    assert np.array_equal(made.batch(3).tokens, _batches(dataset, 16, size=2, seed=9).batch(3).tokens)
