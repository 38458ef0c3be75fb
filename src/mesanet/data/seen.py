"""Which documents have been seen: a set of 64-bit hashes in bounded memory, however many there are."""

from __future__ import annotations

import mmap
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

RECENT = 1 << 16
IN_MEMORY = 1 << 21
STEP = 1 << 20


class SeenHashes:
    """Hashes in sorted runs: small ones in memory, large ones in files that are read through the page cache.

    A run is merged with the one before it as soon as it is as large, so that there are never more than a few dozen
    runs. It all is thrown away in the end; whoever resumes fills it again.
    """

    def __init__(self, folder: Path, recent: int = RECENT, in_memory: int = IN_MEMORY) -> None:
        self._folder = folder
        self._recent_size = recent
        self._in_memory = in_memory
        self._recent: set[int] = set()
        self._runs: list[Hashes] = []
        self._files = 0

    def add(self, hashes: Hashes) -> NDArray[np.bool_]:
        """Add hashes and say of each whether it is new; of equal ones in `hashes`, the first alone is."""
        new = np.zeros(len(hashes), dtype=np.bool_)
        for start in range(0, len(hashes), self._recent_size):
            part = hashes[start : start + self._recent_size]
            new[start : start + len(part)] = self._add(part)
        return new

    def close(self) -> None:
        """Remove the files."""
        self._runs = []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _add(self, hashes: Hashes) -> NDArray[np.bool_]:
        values, first = np.unique(hashes, return_index=True)
        known = np.zeros(len(values), dtype=np.bool_)
        for run in self._runs:
            known |= _contains(run, values)
        new = np.zeros(len(hashes), dtype=np.bool_)
        for value, place in zip(values[~known].tolist(), first[~known].tolist(), strict=True):
            if value not in self._recent:
                self._recent.add(value)
                new[place] = True
        if len(self._recent) >= self._recent_size:
            self._runs.append(np.sort(np.fromiter(self._recent, dtype=np.uint64, count=len(self._recent))))
            self._recent = set()
            self._merge()
        return new

    def _merge(self) -> None:
        while len(self._runs) > 1 and len(self._runs[-1]) >= len(self._runs[-2]) // 2:
            second, first = self._runs.pop(), self._runs.pop()
            size = len(first) + len(second)
            merged = np.empty(size, dtype=np.uint64) if size <= self._in_memory else self._new_file(size)
            end = 0
            for part in _merged(first, second):
                merged[end : end + len(part)] = part
                end += len(part)
            assert end == size, (end, size)
            _release(merged)
            _remove(first)
            _remove(second)
            self._runs.append(merged)

    def _new_file(self, size: int) -> Hashes:
        self._folder.mkdir(exist_ok=True)
        self._files += 1
        path = self._folder / f"{self._files:06}.seen"
        # Written rather than left as a hole: a full disk then is an error here, and not a signal while writing into it.
        with path.open("wb") as file:
            for start in range(0, size * 8, STEP):
                file.write(bytes(min(STEP, size * 8 - start)))
        return np.memmap(path, dtype=np.uint64, mode="r+", shape=(size,))


def _merged(first: Hashes, second: Hashes) -> Iterator[Hashes]:
    """Merge two sorted runs, a little at a time."""
    while len(first) or len(second):
        # Everything up to the smaller of the two ends of the next steps is known to be complete.
        ends = [run[min(STEP, len(run)) - 1] for run in (first, second) if len(run)]
        limit = min(ends)
        counts = [int(np.searchsorted(run[:STEP], limit, side="right")) for run in (first, second)]
        part = np.concatenate([first[: counts[0]], second[: counts[1]]])
        part.sort(kind="stable")
        yield part
        _release(first)
        _release(second)
        first, second = first[counts[0] :], second[counts[1] :]


def _contains(run: Hashes, values: Hashes) -> NDArray[np.bool_]:
    """Say which of the sorted `values` are in the sorted run."""
    places = np.searchsorted(run, values)
    places[places == len(run)] = 0
    found: NDArray[np.bool_] = np.asarray(run[places] == values)
    _release(run)
    return found


def _release(run: Hashes) -> None:
    """Take a run's pages out of this process's memory; they stay in the page cache as long as there is room."""
    mapping = getattr(run, "_mmap", None)
    if mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED)


def _remove(run: Any) -> None:
    if isinstance(run, np.memmap) and run.filename is not None:
        Path(run.filename).unlink()
