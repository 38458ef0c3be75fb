"""Writing groups of token shards: each whole or absent, and each group on record once it is there."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from mesanet.data.documents import Documents
from mesanet.data.layout import SPLITS, documents_name, file_entry, record_name, tokens_name
from mesanet.data.permutation import fold, mix
from mesanet.io import sync_folder, write_bytes_atomic, write_json_atomic

COUNTS = ("documents", "duplicates", "empty", "bytes")


class _Shard:
    """One split's part of a group while it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(path.name + ".partial")
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self._lengths: list[NDArray[np.int64]] = []
        self._hashes: list[NDArray[np.uint64]] = []
        self.tokens = 0
        self.documents = 0

    def append(self, lengths: NDArray[np.int64], hashes: NDArray[np.uint64], tokens: NDArray[Any]) -> None:
        if self._file is None:
            self._file = self._partial.open("wb")
        data = tokens.tobytes()
        self._file.write(data)
        self._digest.update(data)
        self._lengths.append(lengths)
        self._hashes.append(hashes)
        self.tokens += len(tokens)
        self.documents += len(lengths)

    def finish(self, table: Path) -> dict[str, Any] | None:
        """Put the shard and its table of documents in place; None where nothing was written."""
        if self._file is None:
            return None
        ends = np.cumsum(np.concatenate(self._lengths)).astype(np.uint64)
        write_bytes_atomic(table, np.stack([ends, np.concatenate(self._hashes)]).astype("<u8").tobytes())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._partial.replace(self._path)
        return file_entry(self._path, self._digest.hexdigest(), tokens=self.tokens, documents=self.documents)

    def abandon(self) -> None:
        if self._file is not None and not self._file.closed:
            # Closing writes what is left in the buffer; on a full disk that fails once more, and does not matter.
            with contextlib.suppress(OSError):
                self._file.close()


class ShardWriter:
    """Sorts documents into train and validation, and writes both, a group of shards at a time."""

    def __init__(self, folder: Path, shard_tokens: int, validation_fraction: float, seed: int) -> None:
        self._folder = folder
        self._limit = shard_tokens
        self._fraction = validation_fraction
        self._key = np.uint64(fold(seed))
        self.counts = dict.fromkeys(COUNTS, 0)
        self.tokens = 0
        self.number = 0
        self._shards: dict[str, _Shard] = {}
        self._start_group()

    def restore(self, record: dict[str, Any]) -> None:
        """Go on behind the group that a record describes."""
        self.number = record["number"] + 1
        self.counts = dict(record["counts"])
        self.tokens = record["tokens"]
        self._start_group()

    def add(self, documents: Documents, fresh: NDArray[np.bool_], position: Any, skipped: int) -> None:
        """Add a block's documents that are `fresh`.

        `position` is where the sources give this block again, and `skipped` how many documents of it came earlier.
        """
        start = 0
        kept_lengths = np.where(fresh, documents.lengths, 0)
        totals = np.cumsum(kept_lengths)
        while start < len(documents):
            room = self._limit - sum(shard.tokens for shard in self._shards.values())
            before = int(totals[start - 1]) if start else 0
            stop = min(int(np.searchsorted(totals, before + room)) + 1, len(documents))
            self._add_part(documents.part(start, stop), fresh[start:stop])
            start = stop
            if sum(shard.tokens for shard in self._shards.values()) >= self._limit:
                self.finish_group([position, skipped + stop])

    def finish_group(self, position: Any) -> None:
        """Put the group's shards in place, then the record that makes them count."""
        shards = {}
        for split, shard in self._shards.items():
            entry = shard.finish(self._folder / documents_name(split, self.number))
            if entry is not None:
                shards[split] = entry
        if not shards:
            return
        sync_folder(self._folder)
        record = {
            "number": self.number,
            "shards": shards,
            "position": position,
            "counts": self.counts,
            "tokens": self.tokens,
        }
        write_json_atomic(self._folder / record_name(self.number), record)
        self.number += 1
        self._start_group()

    def abandon(self) -> None:
        """Close what is open; the unfinished files go when the preparation is resumed."""
        for shard in self._shards.values():
            shard.abandon()

    def _start_group(self) -> None:
        self._shards = {split: _Shard(self._folder / tokens_name(split, self.number)) for split in SPLITS}

    def _add_part(self, documents: Documents, fresh: NDArray[np.bool_]) -> None:
        full = documents.lengths > 0
        self.counts["empty"] += int((~full).sum())
        self.counts["duplicates"] += int((full & ~fresh).sum())
        self.counts["documents"] += int(fresh.sum())
        self.counts["bytes"] += int(documents.sizes[fresh].sum())
        self.tokens += int(documents.lengths[fresh].sum())
        held_out = is_held_out(documents.hashes, self._fraction, self._key)
        for split, chosen in (("train", fresh & ~held_out), ("validation", fresh & held_out)):
            if chosen.any():
                # Most blocks go as a whole; only the others need a mask over their tokens.
                whole = bool(chosen[full].all())
                tokens = documents.tokens if whole else documents.tokens[np.repeat(chosen, documents.lengths)]
                self._shards[split].append(documents.lengths[chosen], documents.hashes[chosen], tokens)


def is_held_out(hashes: NDArray[np.uint64], fraction: float, key: np.uint64) -> NDArray[np.bool_]:
    """Say which documents are for validation: the same ones in any order and any company."""
    # 53 bits are what a float64 compares exactly, a fraction of 1 included.
    held_out: NDArray[np.bool_] = (mix(hashes ^ key) >> np.uint64(11)).astype(np.float64) < fraction * 2.0**53
    return held_out
