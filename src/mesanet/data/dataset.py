"""Opening a prepared folder: documents by number, from memory-mapped shards that have been checked."""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mesanet.data.index import check_contents, check_sizes, entries, read_index
from mesanet.data.layout import INDEX, PLAN, SPLITS, TOKENIZER
from mesanet.data.tokenizer import Tokenizer, load_tokenizer
from mesanet.errors import UserError

# Every map holds a file descriptor, of which a process has about a thousand.
MAPS = 256


class Split:
    """The documents of one split, numbered in the order of the sources."""

    def __init__(self, folder: Path, name: str, entry: dict[str, Any], token_type: str) -> None:
        self.name = name
        self.folder = folder
        self.tokens: int = entry["tokens"]
        """Tokens of all documents, without BOS."""
        self._type = np.dtype(token_type).newbyteorder("<")
        self._shards = [folder / shard["file"] for shard in entry["shards"]]
        self._shard_ends = np.cumsum([shard["tokens"] for shard in entry["shards"]], dtype=np.int64)
        self._maps: OrderedDict[int, NDArray[Any]] = OrderedDict()
        table = _map_file(folder / entry["table"]["file"], np.dtype("<u8")) if self._shards else np.empty(0, np.uint64)
        self._table = table.reshape(2, -1)

    def __len__(self) -> int:
        return self._table.shape[1]

    def __getitem__(self, document: int) -> NDArray[Any]:
        """Return the tokens of a document [T]: a view into the shard that can't be written to."""
        if not 0 <= document < len(self):
            raise IndexError(f"the {self.name} split has documents 0 to {len(self) - 1}, asked for {document}")
        start, end = (int(value) for value in self.bounds(np.array([document]))[:, 0])
        return self.slice(start, end)

    def bounds(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where documents start and end, counted over all shards [2, ...]."""
        ends = self._table[0]
        starts = np.where(documents > 0, ends[np.maximum(documents - 1, 0)], 0)
        return np.stack([starts, ends[documents]]).astype(np.int64)

    def slice(self, start: int, end: int) -> NDArray[Any]:
        """Return the tokens from `start` to `end`, counted over all shards; they must lie in one shard."""
        shard = int(np.searchsorted(self._shard_ends, start, side="right"))
        before = int(self._shard_ends[shard - 1]) if shard else 0
        assert end <= self._shard_ends[shard], "documents never lie across two shards"
        return self._open(shard)[start - before : end - before]

    def shards(self) -> Iterator[NDArray[Any]]:
        """Give all tokens, shard by shard."""
        for shard in range(len(self._shards)):
            yield self._open(shard)

    def _open(self, shard: int) -> NDArray[Any]:
        tokens = self._maps.get(shard)
        if tokens is None:
            tokens = self._maps[shard] = _map_file(self._shards[shard], self._type)
            if len(self._maps) > MAPS:
                self._maps.popitem(last=False)
        else:
            self._maps.move_to_end(shard)
        return tokens


class Dataset:
    """A prepared folder."""

    def __init__(self, folder: Path, index: dict[str, Any]) -> None:
        self.folder = folder
        self.index = index
        self.vocabulary: int = index["tokenizer"]["vocabulary"]
        self.bos: int = index["tokenizer"]["bos"]
        self.train, self.validation = (
            Split(folder, split, index["splits"][split], index["token_type"]) for split in SPLITS
        )

    @property
    def fingerprint(self) -> str:
        """A hash of all tokens, documents and the tokenizer: equal fingerprints mean equal data, wherever they lie."""
        parts = [self.index["tokenizer"]["fingerprint"], *(entry["sha256"] for entry in entries(self.index))]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def split(self, name: str) -> Split:
        """Return a split by its name."""
        if name not in SPLITS:
            raise UserError(f"there is no split {name!r}, only {' and '.join(SPLITS)}")
        return self.train if name == "train" else self.validation

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer that the folder was prepared with."""
        entry = self.index["tokenizer"]
        copied = any(file["file"] == TOKENIZER for file in self.index["files"])
        tokenizer = load_tokenizer(self.folder / TOKENIZER if copied else entry["name"], entry["bos_token"])
        if tokenizer.fingerprint != entry["fingerprint"]:
            raise UserError(f"the tokenizer {entry['name']} here is not the one that {self.folder} was prepared with")
        return tokenizer


def open_dataset(folder: str | os.PathLike[str], *, verify: bool | None = None) -> Dataset:
    """Open a prepared folder, or raise DamagedShardError that names the file that is wrong.

    Sizes are always checked. Checksums are checked the first time, and again for files that have changed since, or
    for all with `verify=True`; never with `verify=False`.
    """
    path = Path(folder)
    if not (path / INDEX).is_file():
        state = "is not finished; run the same command again" if (path / PLAN).exists() else "does not exist"
        raise UserError(f"{path} is no prepared data: its {INDEX} {state}; `mesanet data prepare` writes one")
    index = read_index(path)
    check_sizes(path, index)
    if verify is not False:
        check_contents(path, index, everything=verify is True)
    return Dataset(path, index)


def _map_file(path: Path, kind: np.dtype[Any]) -> NDArray[Any]:
    """Map a file read-only, as a plain array: slicing a memmap itself is several times slower."""
    return np.memmap(path, dtype=kind, mode="r").view(np.ndarray)
