"""Opening prepared data: what is damaged is refused by name, and what is whole is read as it was written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.data.conftest import make_texts

from mesanet.data import DamagedShardError, Dataset, Split, open_dataset
from mesanet.errors import UserError
from mesanet.io import file_digest


@pytest.fixture
def copy(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "copy"))


def _flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def _cut(path: Path, place: int) -> None:
    path.write_bytes(path.read_bytes()[:place])


def _remove(path: Path, place: int) -> None:
    path.unlink()


@pytest.mark.parametrize("name", ["train-00001.tokens", "validation-00000.tokens", "train.documents"])
@pytest.mark.parametrize(
    ("damage", "says"), [(_flip, "checksum is wrong"), (_cut, "bytes instead of"), (_remove, "missing")]
)
@pytest.mark.parametrize("opened_before", [False, True])
def test_damage_is_refused_by_name(
    copy: Path, name: str, damage: Callable[[Path, int], None], says: str, opened_before: bool
) -> None:
    (copy / "verified.json").unlink(missing_ok=True)
    if opened_before:
        open_dataset(copy)
    damage(copy / name, 17)
    with pytest.raises(DamagedShardError, match=f"{name} is .*{says}|{name} is {says}"):
        open_dataset(copy)


def test_checksums_are_asked_for_once_and_on_request(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (copy / "verified.json").unlink(missing_ok=True)
    read: list[str] = []

    def watched(path: Path) -> str:
        read.append(path.name)
        return file_digest(path)

    monkeypatch.setattr("mesanet.data.index.file_digest", watched)
    open_dataset(copy, verify=False)
    assert not read
    open_dataset(copy)
    everything = sorted(read)
    assert "train-00000.tokens" in everything
    read.clear()
    open_dataset(copy)
    assert not read
    open_dataset(copy, verify=True)
    assert sorted(read) == everything


@pytest.mark.parametrize("note", [b"[1]", b"{", b"\xff"])
def test_a_note_of_what_was_checked_that_is_damaged_says_nothing(copy: Path, note: bytes) -> None:
    (copy / "verified.json").write_bytes(note)
    _flip(copy / "train-00000.tokens", 17)
    with pytest.raises(DamagedShardError, match="checksum is wrong"):
        open_dataset(copy)


def test_data_that_cannot_be_written_to_can_be_read(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (copy / "verified.json").unlink(missing_ok=True)

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("mesanet.data.index.write_json_atomic", refuse)
    assert len(open_dataset(copy).train) > 0
    assert not (copy / "verified.json").exists()


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (lambda folder: None, "is no prepared data"),
        (lambda folder: (folder / "preparation.json").write_text("{}"), "is not finished; run the same command again"),
        (lambda folder: (folder / "index.json").write_text("{"), "not valid JSON"),
        (lambda folder: (folder / "index.json").write_text(json.dumps({"format": 999})), "not of format"),
        (lambda folder: (folder / "index.json").write_text('{"format": 1}'), "index.json is damaged: it has no 'token"),
        (lambda folder: (folder / "index.json").write_bytes(b'{"\xff'), "index.json is not valid JSON"),
    ],
)
def test_what_is_no_prepared_data(tmp_path: Path, prepare: Callable[[Path], object], says: str) -> None:
    prepare(tmp_path)
    with pytest.raises(ValueError, match=says):
        open_dataset(tmp_path)


def test_documents_are_views_that_cannot_be_written_to(dataset: Dataset) -> None:
    tokens = dataset.train[3]
    assert tokens.dtype == np.uint16
    assert not tokens.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


@pytest.mark.parametrize("number", [-1, 10**6])
def test_documents_that_are_not_there(dataset: Dataset, number: int) -> None:
    with pytest.raises(IndexError, match=f"asked for {number}"):
        dataset.train[number]
    with pytest.raises(UserError, match="no split 'test'"):
        dataset.split("test")


def test_more_shards_than_may_be_open(dataset: Dataset, prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesanet.data.dataset.MAPS", 1)
    again = open_dataset(prepared)
    for number in np.random.default_rng(0).permutation(len(dataset.train)):
        assert np.array_equal(again.train[number], dataset.train[number])


def hashes(split: Split) -> NDArray[np.uint64]:
    """The second row of a split's table of documents."""
    return np.fromfile(split.folder / f"{split.name}.documents", dtype="<u8").reshape(2, -1)[1]


def test_counts_agree(dataset: Dataset) -> None:
    for split in (dataset.train, dataset.validation):
        assert split.tokens == sum(len(split[i]) for i in range(len(split)))
        assert len(np.unique(hashes(split))) == len(split)


def test_fingerprints_are_of_the_data_and_not_of_the_place(dataset: Dataset, copy: Path) -> None:
    assert open_dataset(copy).fingerprint == dataset.fingerprint


def test_a_text_can_be_found_by_its_hash(dataset: Dataset) -> None:
    """The hash is BLAKE2b-64 of the UTF-8, so that anyone can tell whether a text is in the data."""
    from hashlib import blake2b

    text = make_texts(200)[0].encode()
    found = np.concatenate([hashes(dataset.train), hashes(dataset.validation)])
    assert int.from_bytes(blake2b(text, digest_size=8).digest(), "little") in found.tolist()
