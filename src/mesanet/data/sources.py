"""What a preparation reads: files and folders, data sets of the hub, and the corpus that Python brings along."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from mesanet.config.data import PrepareConfig
from mesanet.data.documents import Block
from mesanet.data.hub import HubSource
from mesanet.data.parquet import parquet_blocks
from mesanet.data.python_stdlib import NAME as STDLIB
from mesanet.data.python_stdlib import PythonStdlib
from mesanet.data.streams import line_blocks, text_blocks
from mesanet.errors import UserError

TEXT = (".txt", ".txt.gz", ".txt.zst")
LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
PARQUET = (".parquet",)
SUFFIXES = (*TEXT, *LINES, *PARQUET)
ENDS = 1 << 16


class Source(Protocol):
    """Something that documents come from, in an order that never changes."""

    name: str
    """What messages call it."""
    size: int | None
    """Bytes as stored; None where that is not known."""

    def identity(self) -> dict[str, Any]:
        """Say, as plain JSON data, what would have to be equal for the documents to be equal."""
        ...

    def blocks(self, start: Any) -> Iterator[Block]:
        """Give the documents from a block's position on, or from the beginning for None."""
        ...


class FileSource:
    """One file of text, of JSON lines, or of parquet."""

    def __init__(self, path: Path, name: str, config: PrepareConfig) -> None:
        self.name = name
        self.size: int | None = path.stat().st_size
        self._path = path
        self._config = config

    def identity(self) -> dict[str, Any]:
        """Say the name, the size, and a hash of both ends: quick to find out, and the same after copying."""
        digest = hashlib.sha256()
        with self._path.open("rb") as file:
            digest.update(file.read(ENDS))
            file.seek(max(self.size or 0, ENDS) - ENDS)
            digest.update(file.read(ENDS))
        return {"file": self.name, "size": self.size, "ends": digest.hexdigest()}

    def blocks(self, start: Any) -> Iterator[Block]:
        """Give the file's documents."""
        path, config = self._path, self._config
        if path.name.endswith(LINES):
            return line_blocks(path, str(path), start)
        if path.name.endswith(PARQUET):
            return parquet_blocks(path, str(path), start, config.text_column)
        return text_blocks(path, str(path), start, config.separator, config.document_bytes)


def find_sources(config: PrepareConfig) -> list[Source]:
    """Turn the words of a command line into sources: files in the order given, folders in the order of their names."""
    return [source for word in config.sources for source in _find(word, config)]


def _find(word: str, config: PrepareConfig) -> Sequence[Source]:
    if word == STDLIB:
        return [PythonStdlib()]
    if word.startswith("hub:"):
        return [_hub(word.removeprefix("hub:"), config)]
    path = Path(word)
    if path.is_dir():
        return _folder(path, config)
    if path.exists():
        return [_file(path, path.name, config)]
    if re.fullmatch(r"[\w.-]+/[\w.-]+", word) and not path.parent.is_dir() and not word.endswith(SUFFIXES):
        return [_hub(word, config)]
    raise UserError(f"there is no source {word}: it is neither a file, a folder, {STDLIB!r} nor a name owner/data-set")


def _hub(name: str, config: PrepareConfig) -> HubSource:
    if not name:
        raise UserError("hub: needs the name of a data set behind it, such as hub:cerebras/SlimPajama-627B")
    return HubSource(
        name, config.text_column, config=config.hub_config, split=config.hub_split, revision=config.hub_revision
    )


def _file(path: Path, name: str, config: PrepareConfig) -> FileSource:
    if not name.endswith(SUFFIXES):
        raise UserError(f"{path} has a suffix that says nothing about its format; accepted are {', '.join(SUFFIXES)}")
    if not _is_unicode(name):
        raise UserError(f"the name {name!r} is not UTF-8, so that no record can hold it; rename the file")
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty; leave it out")
    return FileSource(path, name, config)


def _is_unicode(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _inside(folder: Path, above: tuple[str, ...] = ()) -> Iterator[Path]:
    """Every file below a folder, also through links to other folders, but not round and round."""
    here = os.path.realpath(folder)
    for path in folder.iterdir() if here not in above else ():
        if path.is_dir():
            yield from _inside(path, (*above, here))
        else:
            yield path


def _folder(folder: Path, config: PrepareConfig) -> list[FileSource]:
    """Take every file of a known suffix; empty ones hold no document and are passed over."""
    files = [path for path in _inside(folder) if path.name.endswith(SUFFIXES) and path.is_file()]
    found = sorted((path.relative_to(folder).as_posix(), path) for path in files if path.stat().st_size > 0)
    if not found:
        raise UserError(f"the folder {folder} holds no file that ends in {', '.join(SUFFIXES)} and is not empty")
    return [_file(path, name, config) for name, path in found]
