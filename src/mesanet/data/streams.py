"""Source files as streams of bytes, compressed or not, with every way of being broken told in one sentence."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from mesanet.data.documents import LONGEST, MEBIBYTE, Block, check_length
from mesanet.errors import UserError
from mesanet.optional import import_optional

BLOCK = MEBIBYTE


class Stream:
    """A file's bytes after decompression, and how much of the file itself has been read."""

    def __init__(self, path: Path, raw: BinaryIO, plain: Any, broken: tuple[type[BaseException], ...]) -> None:
        self._path = path
        self._raw = raw
        self._plain = plain
        self._broken = broken

    def read(self, size: int) -> bytes:
        """Return `size` bytes, fewer only at the end of the file."""
        try:
            data: bytes = self._plain.read(size)
            return data
        except EOFError as error:
            raise UserError(f"{self._path} is cut short: its compressed data end before they are complete") from error
        except self._broken as error:
            raise UserError(f"{self._path} is not valid {self._path.suffix} data: {error}") from error

    def skip(self, offset: int) -> None:
        """Go to byte `offset` of the decompressed file, from its start."""
        if self._plain is self._raw:
            self._raw.seek(offset)
            return
        while offset > 0:
            passed = len(self.read(min(offset, BLOCK)))
            if passed == 0:
                return
            offset -= passed

    def position(self) -> int:
        """Return how many bytes of the stored file have been read."""
        return self._raw.tell()


@contextmanager
def open_stream(path: Path) -> Iterator[Stream]:
    """Open a file for reading, decompressed by its suffix."""
    with path.open("rb") as raw:
        if path.suffix == ".gz":
            with gzip.GzipFile(fileobj=raw, mode="rb") as plain:
                yield Stream(path, raw, plain, (gzip.BadGzipFile, zlib.error))
        elif path.suffix == ".zst":
            zstandard = import_optional("zstandard", "data")
            with io.BufferedReader(_ZstdReader(raw, zstandard), BLOCK) as plain:
                yield Stream(path, raw, plain, (zstandard.ZstdError,))
        else:
            yield Stream(path, raw, raw, ())


class _ZstdReader(io.RawIOBase):
    """Decompress zstd frame after frame; unlike the library's own reader it notices a file that is cut short."""

    def __init__(self, raw: BinaryIO, library: Any) -> None:
        self._raw = raw
        self._new: Callable[[], Any] = library.ZstdDecompressor(max_window_size=1 << 27).decompressobj
        self._frame = self._new()
        self._started = False
        self._ready = memoryview(b"")
        self._rest = b""

    def readable(self) -> bool:
        """Say that this can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer with what there is, at least one byte unless the file is at its end."""
        while not self._ready:
            data = self._rest or self._raw.read(1 << 16)
            self._rest = b""
            if not data:
                if self._started:
                    raise EOFError
                return 0
            self._ready = memoryview(self._frame.decompress(data))
            self._started = not self._frame.eof
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, self._new()
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def line_blocks(path: Path, origin: str, start: Any) -> Iterator[Block]:
    """Cut a file into blocks of whole lines. A position is [bytes before, lines before]."""
    offset, line = start or (0, 0)
    with open_stream(path) as stream:
        stream.skip(offset)
        for payload in _cut(stream, b"\n", LONGEST + 8, BLOCK):
            check_length(len(payload), f"{origin}, line {line + 1}")
            yield Block("lines", payload, origin, [offset, line], line, progress=stream.position())
            offset, line = offset + len(payload), line + payload.count(b"\n")


def text_blocks(path: Path, origin: str, start: Any, separator: str | None, longest: int) -> Iterator[Block]:
    """Give a text file in pieces of at most `longest` bytes, cut where a document ends or else at a line's end.

    A position is [bytes before].
    """
    (offset,) = start or (0,)
    mark = b"\n" if separator is None else separator.encode("utf-8")
    with open_stream(path) as stream:
        stream.skip(offset)
        for payload in _cut(stream, mark, longest, longest if separator is None else min(longest, BLOCK)):
            yield Block("text", payload, origin, [offset], offset, progress=stream.position())
            offset += len(payload)


def _cut(stream: Stream, mark: bytes, longest: int, target: int) -> Iterator[bytes]:
    """Cut a stream behind marks into pieces of about `target` bytes; without a mark in `longest` bytes, cut there.

    What is left at the end is one piece, whatever marks it holds.
    """
    piece = b""
    while True:
        wanted = max(target, len(piece) + 1) - len(piece)
        data = stream.read(wanted)
        piece += data
        end = _behind_last(mark, piece)
        while len(data) == wanted and end == 0 and len(piece) < longest:
            wanted = min(BLOCK, longest - len(piece))
            data = stream.read(wanted)
            # A mark may lie across the seam between what was there and what came.
            seam = max(len(piece) - len(mark), 0)
            piece += data
            found = _behind_last(mark, piece[seam:])
            end = found and seam + found
        if len(data) < wanted:
            break
        end = end or _character_end(piece)
        yield piece[:end]
        piece = piece[end:]
    if piece:
        yield piece


def _behind_last(mark: bytes, data: bytes) -> int:
    """Return where the last mark in `data` ends, 0 without one."""
    return data.rfind(mark) + len(mark) if mark in data else 0


def _character_end(data: bytes) -> int:
    """Return how many bytes of `data` end with a whole character of UTF-8."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            size = 1 if byte < 0xC0 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) if size <= back else len(data) - back or len(data)
    return len(data)
