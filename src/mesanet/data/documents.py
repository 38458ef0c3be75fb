"""From a block of raw source bytes to tokenised documents: the part of a preparation that runs in parallel."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mesanet.data.tokenizer import Tokenizer, encode_utf8
from mesanet.errors import UserError

MEBIBYTE = 1 << 20
# Bytes of a record or a row. While it is tokenised, text without spaces takes more than sixty times its size: of longer
# ones a single one would not fit in the memory that is promised.
LONGEST = 6 * MEBIBYTE

BlockKind = Literal["lines", "text", "texts"]


@dataclass(frozen=True)
class Block:
    """A piece of a source, small enough to be held in memory several times."""

    kind: BlockKind
    """Lines of JSON; one whole text; or texts laid end to end, each of the length that `sizes` gives."""
    payload: bytes | memoryview
    """The bytes, in UTF-8."""
    origin: str
    """The file, for messages."""
    position: Any
    """Where the source goes on reading to give this block again: plain JSON data."""
    first: int = 0
    """What came before in the same file: lines for `lines`, bytes for `text`, documents for `texts`."""
    sizes: tuple[int, ...] = ()
    """For `texts`: the length of each in bytes."""
    progress: int = 0
    """Bytes of the source file, as stored, that have been read."""


def texts_block(texts: list[bytes], origin: str, position: Any, first: int, progress: int = 0) -> Block:
    """Lay whole texts end to end as one block."""
    sizes = tuple(map(len, texts))
    return Block("texts", b"".join(texts), origin, position, first, sizes, progress)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How documents are read out of blocks."""

    text_column: str = "text"
    """Field of a JSON record that holds the text."""
    separator: str | None = None
    """String between the documents of a text file; None for one document per file."""


@dataclass(frozen=True)
class Documents:
    """The documents of one block in their order, empty ones included."""

    lengths: NDArray[np.int64]
    """Tokens of each."""
    sizes: NDArray[np.int64]
    """Bytes of UTF-8 of each."""
    hashes: NDArray[np.uint64]
    """64 bits of BLAKE2 of each text."""
    tokens: NDArray[Any]
    """All tokens, end to end."""

    def __len__(self) -> int:
        return len(self.lengths)

    def part(self, start: int, stop: int | None = None) -> Documents:
        """Return the documents from `start` up to `stop`."""
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)])
        stop = len(self) if stop is None else stop
        chosen = slice(start, stop)
        tokens = self.tokens[ends[start] : ends[stop]]
        return Documents(self.lengths[chosen], self.sizes[chosen], self.hashes[chosen], tokens)


def tokenise(block: Block, tokenizer: Tokenizer, reading: Reading) -> Documents:
    """Read a block's documents and turn them into tokens, or raise UserError that names the file and the place."""
    # White space alone is no document; as an empty one it is counted and dropped.
    texts = ["" if text.isspace() else text for text in read_documents(block, reading)]
    encoded = tokenizer.encode_batch(texts)
    raw = [encode_utf8(text) for text in texts]
    return Documents(
        lengths=np.array([len(tokens) for tokens in encoded], dtype=np.int64),
        sizes=np.array([len(data) for data in raw], dtype=np.int64),
        hashes=np.frombuffer(b"".join(map(_hash, raw)), dtype="<u8").astype(np.uint64),
        tokens=np.concatenate([*encoded, np.empty(0, np.uint32)]).astype(token_type(tokenizer.vocabulary)),
    )


def read_documents(block: Block, reading: Reading) -> Iterator[str]:
    """Give the texts of a block's documents, empty ones included."""
    return _READERS[block.kind](block, reading)


def token_type(vocabulary: int) -> np.dtype[Any]:
    """Return the smallest type that token shards use for a vocabulary."""
    return np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")


def check_length(size: int, place: str) -> None:
    """Refuse what is too long for one document."""
    if size > LONGEST:
        raise UserError(
            f"{place}: longer than {LONGEST >> 20} MiB, the most that one may have; cut it into several, or write the "
            "text to a .txt file, which is cut at the ends of lines"
        )


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


def _read_lines(block: Block, reading: Reading) -> Iterator[str]:
    for number, line in enumerate(bytes(block.payload).split(b"\n"), start=block.first + 1):
        if line.strip():
            yield _record_text(line, reading.text_column, f"{block.origin}, line {number}")


def _record_text(line: bytes, column: str, place: str) -> str:
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: not UTF-8 ({error.reason})") from error
    except RecursionError as error:
        raise UserError(f"{place}: not a JSON record (nested too deeply)") from error
    except ValueError as error:
        # Python reads no number of thousands of digits, which is a plain ValueError.
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error).partition(";")[0]
        raise UserError(f"{place}: not a JSON record ({reason})") from error
    if not isinstance(record, dict):
        raise UserError(f"{place}: expected a JSON object with the field {column!r}, got {type(record).__name__}")
    if column not in record:
        raise UserError(f"{place}: no field {column!r}, only {name_columns(record)}; choose one with --text-column")
    text = record[column]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise UserError(f"{place}: the field {column!r} must hold a string, got {type(text).__name__}")
    return text


def _read_text(block: Block, reading: Reading) -> Iterator[str]:
    text = decode(block.payload, block.origin, block.first)
    if "\0" in text:
        raise UserError(f"{block.origin} is not text: it holds a zero byte at byte {block.first + text.index(chr(0))}")
    if block.first == 0:
        text = text.removeprefix("\ufeff")
    if reading.separator is None:
        yield text
    else:
        # The pieces of a file end behind separators, so that nothing but line ends is behind the last one.
        documents = [document.strip("\r\n") for document in text.split(reading.separator)]
        yield from documents if documents[-1] else documents[:-1]


def _read_texts(block: Block, reading: Reading) -> Iterator[str]:
    start = 0
    payload = memoryview(block.payload)
    for number, size in enumerate(block.sizes, start=block.first):
        yield decode(payload[start : start + size], f"{block.origin}, document {number}", 0)
        start += size


_READERS = {"lines": _read_lines, "text": _read_text, "texts": _read_texts}


def decode(data: bytes | memoryview, place: str, offset: int) -> str:
    """Decode UTF-8, or raise UserError that says at which byte it is broken."""
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{place} is not UTF-8 text: byte {offset + error.start} ({error.reason})") from error


def name_columns(columns: Any) -> str:
    """Name a record's fields in a message, not too many of them."""
    names = [repr(name) for name in columns]
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "none"
