"""The corpus that every Python brings along: its own standard library, the sources and the documentation topics."""

from __future__ import annotations

import hashlib
import importlib
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mesanet.data.documents import Block, texts_block
from mesanet.data.tokenizer import encode_utf8
from mesanet.errors import UserError

NAME = "python-stdlib"
# Tests, installed packages, and tables that are neither prose nor program.
EXCLUDED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings"})
EXCLUDED_STARTS = ("_sysconfigdata", "config-", "_bundled", "pydoc_data", "lib-dynload")
BLOCK_BYTES = 1 << 18


class PythonStdlib:
    """The standard library of the Python that runs: one document per module and one per documentation topic."""

    name = NAME

    def __init__(self) -> None:
        self._folder = Path(sysconfig.get_path("stdlib"))
        self._files = sorted(
            (file for file in self._folder.rglob("*.py") if _wanted(file.relative_to(self._folder))),
            key=lambda file: file.relative_to(self._folder).as_posix(),
        )
        self._topics = _topics()
        if not self._files:
            raise UserError(
                f"this Python keeps no sources of its standard library in {self._folder}; name other sources"
            )
        self.size: int | None = sum(file.stat().st_size for file in self._files) + sum(map(len, self._topics))

    def identity(self) -> dict[str, Any]:
        """Say what the corpus is: its name and a hash of all of it."""
        digest = hashlib.sha256()
        for text in self._texts(0):
            digest.update(len(text).to_bytes(8, "little") + text)
        return {"name": NAME, "sha256": digest.hexdigest()}

    def blocks(self, start: Any) -> Iterator[Block]:
        """Give the documents, from the one that the position [number] names."""
        (first,) = start or (0,)
        waiting: list[bytes] = []
        progress, number = 0, first
        for text in self._texts(first):
            waiting.append(text)
            number, progress = number + 1, progress + len(text)
            if sum(map(len, waiting)) >= BLOCK_BYTES:
                yield texts_block(waiting, NAME, [first], first, progress)
                waiting, first = [], number
        if waiting:
            yield texts_block(waiting, NAME, [first], first, progress)

    def _texts(self, first: int) -> Iterator[bytes]:
        for file in self._files[first:]:
            with tokenize.open(file) as text:
                yield encode_utf8(text.read())
        yield from self._topics[max(first - len(self._files), 0) :]


def _wanted(path: Path) -> bool:
    return not any(part in EXCLUDED or part.startswith(EXCLUDED_STARTS) for part in path.parts)


def _topics() -> list[bytes]:
    """Return the language's documentation as `help()` shows it; some distributions leave it out."""
    try:
        module = importlib.import_module("pydoc_data.topics")
    except ImportError:
        return []
    topics: dict[str, str] = module.topics
    return [encode_utf8(f"{topics[name].strip()}\n") for name in sorted(topics)]
