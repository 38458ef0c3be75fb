"""The folder of a preparation: who may write into it, what is finished in it, and how it is completed."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from mesanet.data.index import DamagedShardError, check_contents, check_sizes, read_index, read_plan
from mesanet.data.layout import (
    INDEX,
    LOCK,
    PLAN,
    SEEN,
    SPLITS,
    TOKENIZER,
    documents_name,
    file_entry,
    is_ours,
    record_name,
)
from mesanet.errors import UserError
from mesanet.io import locked, read_json, write_atomic, write_json_atomic


class Folder:
    """Holds a preparation's folder for one process; on leaving, an attempt that finished nothing is taken away."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._created = False
        self._claimed = False
        self._lock = contextlib.ExitStack()

    def __enter__(self) -> Folder:
        if self.path.is_symlink() and not self.path.exists():
            raise UserError(f"{self.path} is a link to {self.path.readlink()}, which does not exist; make that folder")
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.path} is a file; name a folder with --out")
        self._created = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        self._refuse_foreign()
        busy = f"another process is preparing {self.path} right now; wait for it to end"
        try:
            self._lock.enter_context(locked(self.path / LOCK, busy, remove=True))
        except OSError as error:
            # What is finished can be looked at where nothing can be written.
            if error.errno not in (errno.EROFS, errno.EACCES) or not (self.path / INDEX).exists():
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._claimed and not (self.path / INDEX).exists():
            self._remove_unfinished()
            if not self.finished():
                self._remove(PLAN, TOKENIZER)
        self._lock.close()
        if self._created:
            # Another process may have come in, or have been faster.
            with contextlib.suppress(OSError):
                self.path.rmdir()

    def claim(self, plan: dict[str, Any], say: Callable[[str], object]) -> dict[str, Any] | None:
        """Make the folder hold this preparation, or raise UserError if it holds another.

        Returns the index if all of it is done and whole; what has been damaged since is done again.
        """
        if (self.path / INDEX).exists():
            index = read_index(self.path)
            self._refuse_other(index, plan)
            try:
                check_sizes(self.path, index)
                check_contents(self.path, index, everything=True)
            except DamagedShardError as error:
                say(str(error))
                self._begin_anew(plan)
                return None
            self._clear_up()
            return index
        there = read_plan(self.path) if (self.path / PLAN).exists() else None
        if there is not None and self.finished():
            self._refuse_other(there, plan)
        self._claimed = True
        if there is None or _differences(there, plan):
            # What an attempt at something else left behind before it had finished anything, its tokenizer above all.
            self._remove(PLAN, TOKENIZER)
        self._remove_unfinished()
        write_json_atomic(self.path / PLAN, plan)
        return None

    def _begin_anew(self, plan: dict[str, Any]) -> None:
        """Give up what is finished; the plan comes first, so that whoever looks sees a preparation at any moment.

        Records go before the index does: without it they would say that groups are finished whose files are gone.
        """
        self._claimed = True
        write_json_atomic(self.path / PLAN, plan)
        self._remove_records()
        self._remove(INDEX)
        self._remove_unfinished()

    def asked_for(self) -> dict[str, Any] | None:
        """Return the plan of what is in the folder, finished or not; None where there is nothing yet."""
        if (self.path / INDEX).exists():
            return read_index(self.path)
        return read_plan(self.path) if (self.path / PLAN).exists() else None

    def finished(self) -> int:
        """Return how many groups of shards are finished."""
        number = 0
        while (self.path / record_name(number)).exists():
            number += 1
        return number

    def records(self) -> Iterator[dict[str, Any]]:
        """Give the records of the finished groups in order."""
        for number in range(self.finished()):
            yield read_json(self.path / record_name(number))

    def hashes(self, record: dict[str, Any]) -> Iterator[NDArray[np.uint64]]:
        """Give the hashes of a group's documents."""
        for split in record["shards"]:
            yield self._table(split, record)[1]

    def finish(self, plan: dict[str, Any], counts: dict[str, int], *, own_tokenizer: bool) -> dict[str, Any]:
        """Write the tables of whole splits and the index, then remove what only resuming needs."""
        splits = {split: self._finish_split(split) for split in SPLITS}
        files = [file_entry(self.path / TOKENIZER)] if own_tokenizer else []
        index = {**plan, "counts": counts, "splits": splits, "files": files}
        write_json_atomic(self.path / INDEX, index)
        self._clear_up()
        return index

    def _finish_split(self, split: str) -> dict[str, Any]:
        shards = [record["shards"][split] for record in self.records() if split in record["shards"]]
        totals = {name: sum(shard[name] for shard in shards) for name in ("tokens", "documents")}
        if not shards:
            return {**totals, "shards": [], "table": None}
        table = write_atomic(self.path / documents_name(split), lambda file: self._write_table(split, file))
        return {**totals, "shards": shards, "table": file_entry(table)}

    def _write_table(self, split: str, file: BinaryIO) -> None:
        before = np.uint64(0)
        for record in self._records_of(split):
            file.write((self._table(split, record)[0] + before).astype("<u8").tobytes())
            before += np.uint64(record["shards"][split]["tokens"])
        for record in self._records_of(split):
            file.write(self._table(split, record)[1].astype("<u8").tobytes())

    def _records_of(self, split: str) -> Iterator[dict[str, Any]]:
        return (record for record in self.records() if split in record["shards"])

    def _table(self, split: str, record: dict[str, Any]) -> NDArray[np.uint64]:
        path = self.path / documents_name(split, record["number"])
        return np.fromfile(path, dtype="<u8").reshape(2, -1)

    def _refuse_foreign(self) -> None:
        foreign = sorted(entry.name for entry in self.path.iterdir() if not is_ours(entry.name))
        if foreign:
            raise UserError(f"{self.path} holds other files ({', '.join(foreign[:3])}); choose a new folder with --out")

    def _refuse_other(self, there: dict[str, Any], plan: dict[str, Any]) -> None:
        different = _differences(there, plan)
        if not different:
            return
        found = there["tokenizer"]["name"] if different == ["tokenizer"] else None
        what = f"the tokenizer {found}" if found else "other " + " and ".join(different).replace("_", " ")
        raise UserError(
            f"{self.path} holds another preparation, with {what}; choose a new folder with --out{_version(there, plan)}"
        )

    def _remove_unfinished(self) -> None:
        """Remove every file of ours that no record names."""
        keep = {INDEX, PLAN, TOKENIZER, LOCK, *(record_name(number) for number in range(self.finished()))}
        for record in self.records():
            for split, shard in record["shards"].items():
                keep |= {shard["file"], documents_name(split, record["number"])}
        for entry in self.path.iterdir():
            if is_ours(entry.name) and entry.name not in keep and entry.is_file():
                entry.unlink()
        shutil.rmtree(self.path / SEEN, ignore_errors=True)

    def _clear_up(self) -> None:
        """Remove what resuming needed, the records last but for the plan, so that no step looks like a fresh start."""
        for record in self.records():
            self._remove(*(documents_name(split, record["number"]) for split in record["shards"]))
        self._remove_records()
        self._remove(PLAN)
        for entry in self.path.glob(".*.partial"):
            entry.unlink()
        shutil.rmtree(self.path / SEEN, ignore_errors=True)

    def _remove_records(self) -> None:
        """The last one first, so that at any moment those that are left are the first ones."""
        self._remove(*(record_name(number) for number in reversed(range(self.finished()))))

    def _remove(self, *names: str) -> None:
        for name in names:
            (self.path / name).unlink(missing_ok=True)


def _version(there: dict[str, Any], plan: dict[str, Any]) -> str:
    """How to go on with what a data set of the hub was, where it has changed since."""
    for old, new in zip(there["sources"], plan["sources"], strict=False):
        if "hub" in new and old == {**new, "revision": old.get("revision")} and old != new:
            return f", or go on with the version that it was begun with: --hub-revision {old['revision']}"
    return ""


def _differences(there: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    """Name what differs; the name of a tokenizer says nothing that its fingerprint does not say better."""
    old, new = ({**flat, "tokenizer": flat["tokenizer"]["fingerprint"], **flat["options"]} for flat in (there, plan))
    return [name for name in new if name != "options" and old.get(name) != new[name]]
