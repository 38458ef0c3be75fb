"""The index of a prepared folder: what it says, and whether the files are still as it says."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from mesanet.data.layout import FORMAT, INDEX, PLAN, SPLITS, VERIFIED
from mesanet.errors import UserError
from mesanet.io import Shape, check_shape, file_digest, read_json, read_record, write_json_atomic

REMEDY = "prepare the data again: the same command makes a damaged folder anew"

_FILE: Shape = {"file": str, "bytes": int, "sha256": str}
_SPLIT: Shape = {
    "tokens": int,
    "documents": int,
    "shards": [{"file": str, "bytes": int, "sha256": str, "tokens": int}],
    "table": (None, _FILE),
}
_PLANNED: dict[str, Shape] = {
    "tokenizer": {"name": str, "vocabulary": int, "bos": int, "bos_token": (None, str), "fingerprint": str},
    "token_type": str,
    "options": {},
    "sources": [{}],
}


class DamagedShardError(UserError):
    """A file of a prepared folder is not what the index says; the text names it."""


def read_index(folder: Path) -> dict[str, Any]:
    """Read what a finished folder says of itself."""
    return _read(folder / INDEX, {"counts": {}, "splits": dict.fromkeys(SPLITS, _SPLIT), "files": [_FILE]})


def read_plan(folder: Path) -> dict[str, Any]:
    """Read what a preparation that is not finished was asked for."""
    return _read(folder / PLAN, {})


def _read(path: Path, more: dict[str, Shape]) -> dict[str, Any]:
    remedy = f"remove {path.name} and prepare the data again: the same command then makes the folder anew"
    try:
        found = read_json(path)
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise UserError(f"{path} is not of format {FORMAT}, the only one that this version reads")
        check_shape(path, found, {**_PLANNED, **more})
    except UserError as error:
        raise UserError(f"{error}; {remedy}") from error
    return found


def entries(index: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what the index says of each file."""
    splits = [index["splits"][split] for split in SPLITS]
    tables = [split["table"] for split in splits if split["table"] is not None]
    return [*(shard for split in splits for shard in split["shards"]), *tables, *index["files"]]


def check_sizes(folder: Path, index: dict[str, Any]) -> None:
    """Refuse a file that is missing, longer or shorter."""
    for entry in entries(index):
        path, size = folder / entry["file"], entry["bytes"]
        try:
            found = path.stat().st_size
        except FileNotFoundError as error:
            raise DamagedShardError(f"{path} is missing; {REMEDY}") from error
        if found != size:
            raise DamagedShardError(f"{path} is damaged: it has {found} bytes instead of {size}; {REMEDY}")


def check_contents(folder: Path, index: dict[str, Any], *, everything: bool) -> None:
    """Refuse a file with another checksum, and note which files, as they are now, need no second check."""
    known: dict[str, Any] = {}
    if not everything and (folder / VERIFIED).exists():
        # A note that can't be read says nothing.
        with contextlib.suppress(ValueError):
            known = read_record(folder / VERIFIED, {})
    checked = {}
    for entry in entries(index):
        path = folder / entry["file"]
        mark = [entry["sha256"], path.stat().st_mtime_ns]
        if known.get(entry["file"]) != mark and file_digest(path) != entry["sha256"]:
            raise DamagedShardError(f"{path} is damaged: its checksum is wrong; {REMEDY}")
        checked[entry["file"]] = mark
    if checked != known:
        # Data that others own, or on a medium that can't be written to, are checked each time.
        with contextlib.suppress(OSError):
            write_json_atomic(folder / VERIFIED, checked)
