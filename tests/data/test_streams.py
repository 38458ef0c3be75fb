"""Cutting files into blocks: nothing is lost, nothing is cut apart, and reading can start at any block."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesanet.data import documents, streams
from mesanet.data.documents import Block
from mesanet.data.streams import line_blocks, open_stream, text_blocks
from mesanet.errors import UserError


def _zstd(data: bytes) -> bytes:
    import zstandard

    half = len(data) // 2
    return b"".join(zstandard.ZstdCompressor().compress(part) for part in (data[:half], data[half:]))


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": lambda data: gzip.compress(data[:100]) + gzip.compress(data[100:]),
    ".zst": _zstd,
}


def _payloads(blocks: list[Block]) -> list[bytes]:
    return [bytes(block.payload) for block in blocks]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_streams_give_the_whole_file_and_can_skip(tmp_path: Path, suffix: str) -> None:
    data = bytes(range(256)) * 4000
    path = tmp_path / f"data{suffix}"
    path.write_bytes(COMPRESS[suffix](data))
    with open_stream(path) as stream:
        assert stream.read(len(data) + 1) == data
    with open_stream(path) as stream:
        stream.skip(600_001)
        assert stream.read(len(data)) == data[600_001:]
    with open_stream(path) as stream:
        stream.skip(len(data) + 5)
        assert stream.read(1) == b""


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"data{suffix}"
    whole = COMPRESS[suffix](bytes(range(256)) * 4000)
    path.write_bytes(whole[:-7])
    with open_stream(path) as stream, pytest.raises(UserError, match="cut short"):
        stream.read(1 << 30)
    path.write_bytes(b"this is not compressed at all, and long enough for every header")
    with open_stream(path) as stream, pytest.raises(UserError, match="not valid"):
        stream.read(1 << 30)


@given(
    lines=st.lists(st.binary(max_size=40).map(lambda line: line.replace(b"\n", b"")), max_size=30),
    last=st.booleans(),
    size=st.integers(1, 64),
)
def test_blocks_of_lines(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], last: bool, size: int) -> None:
    path = tmp_path_factory.mktemp("lines") / "data.jsonl"
    data = b"\n".join(lines) + (b"\n" if last else b"")
    path.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "BLOCK", size)
        blocks = list(streams.line_blocks(path, "data", None))
        assert b"".join(_payloads(blocks)) == data
        for number, block in enumerate(blocks):
            before = b"".join(_payloads(blocks[:number]))
            assert before == b"" or before.endswith(b"\n")
            assert block.first == before.count(b"\n")
            assert _payloads(list(line_blocks(path, "data", block.position))) == _payloads(blocks[number:])


@pytest.mark.parametrize("separator", [None, "<|endoftext|>", "\n\n"])
@given(text=st.text(st.sampled_from("aé🙂\n<|endoftext|>"), max_size=3000), longest=st.integers(1024, 2048))
def test_pieces_of_text(
    tmp_path_factory: pytest.TempPathFactory, separator: str | None, text: str, longest: int
) -> None:
    path = tmp_path_factory.mktemp("text") / "data.txt"
    path.write_text(text, encoding="utf-8", newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "BLOCK", 100)
        blocks = list(text_blocks(path, "data", None, separator, longest))
        assert b"".join(_payloads(blocks)).decode() == text
        for number, block in enumerate(blocks):
            assert len(block.payload) <= longest
            bytes(block.payload).decode()  # no character is cut apart
            following = list(text_blocks(path, "data", block.position, separator, longest))
            assert _payloads(following) == _payloads(blocks[number:])
        if separator is None and len(text.encode()) < longest:
            assert len(blocks) <= 1


def test_a_separator_across_the_seam_of_two_reads_is_found(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    for before in range(80, 110):
        path.write_bytes(b"x" * before + b"<|endoftext|>" + b"y" * 500)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(streams, "BLOCK", 100)
            first, *_ = text_blocks(path, "data", None, "<|endoftext|>", 4096)
        assert bytes(first.payload) in (b"x" * before + b"<|endoftext|>", path.read_bytes())


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (streams, documents):
        monkeypatch.setattr(module, "LONGEST", 1000)
    monkeypatch.setattr(streams, "BLOCK", 100)
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"short\n" + b"x" * 2000)
    with pytest.raises(UserError, match=r"line 2: longer than"):
        list(line_blocks(path, "data.jsonl", None))


def test_reading_is_told_from_the_stored_file(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl.gz"
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb") as file:
        file.write(b'{"text": "a"}\n' * 300_000)
    path.write_bytes(buffer.getvalue())
    *_, last = line_blocks(path, "data", None)
    assert last.progress == path.stat().st_size
