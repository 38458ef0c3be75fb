"""Packing: the batch of a step depends on (data, seed, step) alone, and shows every token once an epoch."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.conftest import config, write_lines

from mesanet.config.data import DataConfig
from mesanet.data import (
    IGNORED,
    Batches,
    Dataset,
    PackedStream,
    document_windows,
    make_batches,
    open_dataset,
    packed_windows,
    prepare,
)
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


def _stream(dataset: Dataset, seed: int, epochs: int) -> list[int]:
    """The stream, put together the slow way."""
    count = len(dataset.train)
    tokens: list[int] = []
    for epoch in range(epochs):
        for document in Permutation(count, seed, epoch, 0)(np.arange(count)).tolist():
            tokens += [BOS, *dataset.train[document].tolist()]
    return tokens


def _batches(dataset: Dataset, length: int, size: int = 4, seed: int = 0) -> Batches:
    return Batches(dataset.train, BOS, sequence_length=length, batch_size=size, seed=seed)


@given(length=st.integers(1, 254), seed=st.integers(0, 10**9), starts=st.lists(st.integers(0, 2000), min_size=1))
def test_stretches_are_cut_from_the_stream(tiny: Dataset, length: int, seed: int, starts: list[int]) -> None:
    expected = _stream(tiny, seed, 10)
    rows = PackedStream(tiny.train, BOS, length, seed).stretch(np.array(starts))
    assert rows.tolist() == [expected[start : start + length + 1] for start in starts]


@pytest.mark.parametrize("length", [1, 7, 64, 1000])
def test_stretches_of_many_documents(dataset: Dataset, length: int) -> None:
    """More documents than one bucket holds, and documents in many shards."""
    expected = _stream(dataset, 3, 2)
    starts = np.arange(0, len(expected) - length - 1, max(len(expected) // 50, 1))
    rows = PackedStream(dataset.train, BOS, length, 3).stretch(starts)
    assert rows.tolist() == [expected[start : start + length + 1] for start in starts.tolist()]


@pytest.mark.parametrize("length", [1, 3, 10, 100, 254])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_token_comes_once_an_epoch(tiny: Dataset, length: int, seed: int) -> None:
    """The sequences that start in the first epochs are those of the stream, each once, in another order."""
    expected = _stream(tiny, seed, 4)
    epoch = len(expected) // 4
    edges = [-(-edge * epoch // length) for edge in range(4)]
    stream = PackedStream(tiny.train, BOS, length, seed)
    for first, end in pairwise(edges):
        rows = stream.sequences(np.arange(first, end))
        cut = [expected[i * length : (i + 1) * length + 1] for i in range(first, end)]
        assert Counter(map(tuple, rows.tolist())) == Counter(map(tuple, cut))
    inputs = stream.sequences(np.arange(edges[3]))[:, :-1]
    documents = Counter(token for i in range(len(tiny.train)) for token in tiny.train[i].tolist())
    # Three epochs, but for the sequence that began in the third and went on in the fourth.
    extra = Counter(inputs.ravel().tolist()) - Counter({t: 3 * n for t, n in documents.items()} | {BOS: 30})
    assert extra.total() == edges[3] * length - 3 * epoch < length


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


def test_parts_of_a_long_document_end_up_far_apart(tmp_path: Path) -> None:
    """Sequences that follow each other in the stream are not neighbours in training."""
    source = write_lines(tmp_path / "data.jsonl", ["".join(chr(65 + i % 26) * 10 for i in range(1000))])
    prepare(config(source, out=tmp_path / "out", validation_fraction=0.0), quiet=True)
    numbers = PackedStream(open_dataset(tmp_path / "out").train, BOS, 10, 0)._shuffled(np.arange(1000))
    assert np.mean(np.abs(np.diff(numbers)) == 1) < 0.02


@pytest.mark.parametrize("length", [255, 10_000])
def test_a_sequence_longer_than_the_corpus_is_refused(tiny: Dataset, length: int) -> None:
    """45 letters, 200 digits and 10 BOS: a sequence of 254 and its last target just fit."""
    PackedStream(tiny.train, BOS, 254, 0)
    with pytest.raises(UserError, match=rf"sequence_length {length} is longer than the train split .* 255 tokens"):
        PackedStream(tiny.train, BOS, length, 0)


def test_an_empty_split_is_refused(tiny: Dataset) -> None:
    with pytest.raises(UserError, match=r"the validation split .* is empty"):
        next(packed_windows(tiny.validation, BOS, sequence_length=8, batch_size=2))


def test_processes_have_to_share_evenly(dataset: Dataset) -> None:
    with pytest.raises(UserError, match="batch_size 4 can't be shared evenly by 3 processes"):
        _batches(dataset, 8).batch(0, 0, 3)


@pytest.mark.parametrize("length", [1, 5, 17, 254, 255, 4096])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_validation_sees_every_token_once(tiny: Dataset, length: int, batch_size: int) -> None:
    batches = list(packed_windows(tiny.train, BOS, sequence_length=length, batch_size=batch_size, seed=2))
    assert all(batch.tokens.shape[1] == length for batch in batches)
    targets = np.concatenate([batch.targets.ravel() for batch in batches])
    expected = [token for token in _stream(tiny, 2, 1) if token != BOS]
    assert targets[targets != IGNORED].tolist() == expected


@pytest.mark.parametrize("length", [1, 7, 50, 1000])
def test_windows_of_documents(tiny: Dataset, length: int) -> None:
    found: dict[int, list[int]] = {}
    for window in document_windows(tiny.train, BOS, length=length):
        targets = found.setdefault(window.document, [])
        assert window.start == len(targets)
        assert window.tokens.tolist() == [targets[-1] if targets else BOS, *window.targets[:-1].tolist()]
        assert 0 < len(window.targets) <= length
        targets += window.targets.tolist()
    assert [found[i] for i in range(len(tiny.train))] == [tiny.train[i].tolist() for i in range(len(tiny.train))]


def test_windows_of_long_documents_only(tiny: Dataset) -> None:
    assert {window.document for window in document_windows(tiny.train, BOS, length=64, at_least=100)} == {9}
    chosen = document_windows(tiny.train, BOS, length=64, documents=np.array([4, 2]))
    assert [window.document for window in chosen] == [4, 2]


def test_batches_from_a_config(dataset: Dataset, prepared: Path) -> None:
    settings = DataConfig(path=prepared, sequence_length=16, batch_size=2, seed=9)
    made = make_batches(dataset, settings)
    assert np.array_equal(made.batch(3).tokens, _batches(dataset, 16, size=2, seed=9).batch(3).tokens)
    assert made.epochs(10) == pytest.approx(320 / (dataset.train.tokens + len(dataset.train)))
