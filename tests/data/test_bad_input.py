"""Bad input: one clear sentence, exit code 2, and nothing destroyed."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.data.conftest import contents, make_texts, write_lines

from mesanet.cli import main
from mesanet.data import open_dataset
from mesanet.data.documents import LONGEST


def _empty(folder: Path) -> Path:
    (folder / "empty.jsonl").write_bytes(b"")
    return folder / "empty.jsonl"


def _only_empty_documents(folder: Path) -> Path:
    return write_lines(folder / "blank.jsonl", ["", ""])


def _garbage_text(folder: Path) -> Path:
    (folder / "garbage.txt").write_bytes(bytes(range(256)) * 100)
    return folder / "garbage.txt"


def _zero_bytes(folder: Path) -> Path:
    (folder / "zeros.txt").write_bytes(b"text\n" * 3 + bytes(1000))
    return folder / "zeros.txt"


def _garbage_lines(folder: Path) -> Path:
    (folder / "garbage.jsonl").write_bytes(b'{"text": "fine"}\n' + bytes(range(128, 256)) * 100)
    return folder / "garbage.jsonl"


def _latin(folder: Path) -> Path:
    (folder / "latin.txt").write_bytes("Grüße".encode("latin-1"))
    return folder / "latin.txt"


def _malformed(folder: Path) -> Path:
    (folder / "data.jsonl").write_text('{"text": "a"}\n\n{"text": "b"}\n{"text": "c"\n')
    return folder / "data.jsonl"


def _list(folder: Path) -> Path:
    (folder / "data.jsonl").write_text('{"text": "a"}\n["b"]\n')
    return folder / "data.jsonl"


def _no_column(folder: Path) -> Path:
    return write_lines(folder / "data.jsonl", ["a"], column="content")


def _white(folder: Path) -> Path:
    (folder / "white.txt").write_text(" \n\n\t ")
    return folder / "white.txt"


def _endless_number(folder: Path) -> Path:
    (folder / "data.jsonl").write_text('{"text": "a"}\n{"text": "b", "x": ' + "9" * 5000 + "}\n")
    return folder / "data.jsonl"


def _number(folder: Path) -> Path:
    (folder / "data.jsonl").write_text('{"text": 3}\n')
    return folder / "data.jsonl"


def _short_gzip(folder: Path) -> Path:
    path = folder / "data.jsonl.gz"
    path.write_bytes(gzip.compress(write_lines(folder / "x", make_texts(500)).read_bytes())[:-20])
    return path


def _no_gzip(folder: Path) -> Path:
    (folder / "data.txt.gz").write_bytes(b"plain text, never compressed")
    return folder / "data.txt.gz"


def _short_zstd(folder: Path) -> Path:
    zstandard = pytest.importorskip("zstandard")
    path = folder / "data.jsonl.zst"
    path.write_bytes(zstandard.ZstdCompressor().compress(write_lines(folder / "x", make_texts(500)).read_bytes())[:-20])
    return path


def _parquet_column(folder: Path) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": [1, 2]}), folder / "data.parquet")
    return folder / "data.parquet"


def _parquet_no_column(folder: Path) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"content": ["a"]}), folder / "data.parquet")
    return folder / "data.parquet"


def _long_row(folder: Path) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["a", "b " * (LONGEST // 2 + 1)]}), folder / "data.parquet")
    return folder / "data.parquet"


def _long_line(folder: Path) -> Path:
    return write_lines(folder / "data.jsonl", ["a", "b " * (LONGEST // 2)])


def _two_columns(folder: Path) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["text", "text"])
    parquet.write_table(table, folder / "data.parquet")
    return folder / "data.parquet"


def _latin_name(folder: Path) -> Path:
    path = folder / os.fsdecode(b"gr\xfc\xdfe.txt")
    path.write_text("text")
    return folder


def _short_parquet(folder: Path) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["a"] * 100}), folder / "data.parquet")
    (folder / "data.parquet").write_bytes((folder / "data.parquet").read_bytes()[:-30])
    return folder / "data.parquet"


def _unknown_suffix(folder: Path) -> Path:
    (folder / "data.csv").write_text("a,b\n")
    return folder / "data.csv"


def _nothing_known(folder: Path) -> Path:
    _unknown_suffix(folder)
    return folder


def _missing(folder: Path) -> Path:
    return folder / "missing.jsonl"


CASES: list[tuple[Callable[[Path], Path], str]] = [
    (_white, "there is no text in white.txt"),
    (_endless_number, "data.jsonl, line 2: not a JSON record (Exceeds the limit"),
    (_empty, "empty.jsonl is empty"),
    (_only_empty_documents, "every document is empty"),
    (_garbage_text, "garbage.txt is not UTF-8 text: byte 128"),
    (_zero_bytes, "zeros.txt is not text: it holds a zero byte at byte 15"),
    (_garbage_lines, "garbage.jsonl, line 2: not UTF-8"),
    (_latin, "latin.txt is not UTF-8 text: byte 2"),
    (_malformed, "data.jsonl, line 4: not a JSON record"),
    (_list, "data.jsonl, line 2: expected a JSON object with the field 'text', got list"),
    (_no_column, "line 1: no field 'text', only 'id', 'content'; choose one with --text-column"),
    (_number, "line 1: the field 'text' must hold a string, got int"),
    (_short_gzip, "data.jsonl.gz is cut short"),
    (_no_gzip, "data.txt.gz is not valid .gz data"),
    (_short_zstd, "data.jsonl.zst is cut short"),
    (_parquet_column, "the column 'text' must hold strings, got int64"),
    (_parquet_no_column, "no column 'text', only 'content'"),
    (_long_row, "data.parquet, document 1: longer than 6 MiB, the most that one may have; cut it into several"),
    (_long_line, "data.jsonl, line 2: longer than 6 MiB"),
    (_two_columns, "data.parquet: there are 2 columns 'text'; rename all but one"),
    (_latin_name, "the name 'gr\\udcfc\\udcdfe.txt' is not UTF-8, so that no record can hold it; rename the file"),
    (_short_parquet, "data.parquet is not a whole parquet file"),
    (_unknown_suffix, "accepted are .txt"),
    (_nothing_known, "holds no file that ends in .txt"),
    (_missing, "there is no source"),
]


def _run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert isinstance(ended.value.code, int)
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize(("write", "says"), CASES, ids=[write.__name__[1:] for write, _ in CASES])
def test_bad_sources(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], write: Callable[[Path], Path], says: str
) -> None:
    (tmp_path / "source").mkdir()
    source = write(tmp_path / "source")
    before = contents(tmp_path)
    out = tmp_path / "out"
    code, errors = _run(capsys, "data", "prepare", source, "--out", out, "--tokenizer", "bytes", "--workers", 0)
    assert code == 2
    assert says in errors
    assert len(errors.strip().splitlines()) == 1
    assert contents(tmp_path) == before
    assert not out.exists()


def test_the_hub_needs_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, errors = _run(capsys, "data", "prepare", "hub:", "--out", tmp_path / "out", "--tokenizer", "bytes")
    assert code == 2
    assert "hub: needs the name of a data set behind it" in errors


def test_a_link_to_nowhere_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "data.jsonl", ["a"])
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    code, errors = _run(capsys, "data", "prepare", source, "--out", tmp_path / "out", "--tokenizer", "bytes")
    assert code == 2
    assert f"out is a link to {tmp_path / 'disk'}, which does not exist; make that folder" in errors


def test_a_damaged_index_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data", "prepare", write_lines(tmp_path / "data.jsonl", ["a", "b"]), "--out", tmp_path / "out"]
    words = [*words, "--tokenizer", "bytes", "--workers", "0", "--validation-fraction", "0"]
    assert _run(capsys, *words)[0] == 0
    before, index = contents(tmp_path / "out"), tmp_path / "out" / "index.json"
    index.write_text(index.read_text()[:-20])
    code, errors = _run(capsys, *words)
    assert code == 2
    assert "remove index.json and prepare the data again" in errors
    index.unlink()
    assert _run(capsys, *words)[0] == 0
    assert contents(tmp_path / "out") == before


def test_a_separator_that_is_nowhere_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\nthree")
    words = ["data", "prepare", tmp_path / "a.txt", "--tokenizer", "bytes", "--workers", "0"]
    words = [*words, "--validation-fraction", "0"]
    code, errors = _run(capsys, *words, "--separator", "@@", "--out", tmp_path / "one")
    assert (code, "--separator '@@', is nowhere in the sources" in errors) == (0, True)
    # As a shell hands it on.
    code, errors = _run(capsys, *words, "--separator", "\\n\\n", "--out", tmp_path / "three")
    assert (code, errors) == (0, "")
    assert len(open_dataset(tmp_path / "three").train) == 3


def test_an_empty_split_is_told_with_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "book.txt").write_text("".join(f"line {number} of a book\n" for number in range(20_000)))
    words = ["data", "prepare", tmp_path / "book.txt", "--tokenizer", "bytes", "--workers", "0", "--out"]
    code, errors = _run(capsys, *words, tmp_path / "one")
    assert code == 0
    assert "the validation split is empty" in errors
    assert "prepare again into another --out" in errors
    advice = ["--document-bytes", "65536", "--validation-fraction", "0.1"]
    assert advice[0] in errors
    assert _run(capsys, *words, tmp_path / "cut", *advice)[0] == 0
    assert len(open_dataset(tmp_path / "cut").train) > 1


def test_mistakes_cross_from_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = _malformed(tmp_path)
    code, errors = _run(capsys, "data", "prepare", source, "--out", tmp_path / "out", "--tokenizer", "bytes")
    assert (code, len(errors.strip().splitlines())) == (2, 1)
    assert "data.jsonl, line 4: not a JSON record" in errors


def test_finished_shards_survive_a_mistake_further_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write_lines(tmp_path / "a.jsonl", make_texts(100))
    (tmp_path / "b.jsonl").write_text("{")
    words = ["data", "prepare", good, tmp_path / "b.jsonl", "--out", tmp_path / "out", "--tokenizer", "bytes"]
    code, errors = _run(capsys, *words, "--shard-tokens", 2000, "--workers", 0)
    assert code == 2
    assert "b.jsonl, line 1" in errors
    assert list((tmp_path / "out").glob("train-*.tokens"))
    assert not list((tmp_path / "out").glob("*.partial"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--tokenizer", "gtp2"], "did you mean 'gpt2'"),
        (["--validation-fraction", "1.5"], "validation_fraction"),
        (["--shard-tokens", "0"], "shard_tokens"),
    ],
)
def test_bad_options(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str) -> None:
    source = write_lines(tmp_path / "data.jsonl", ["a"])
    code, errors = _run(capsys, "data", "prepare", source, "--out", tmp_path / "out", *options)
    assert code == 2
    assert says in " ".join(errors.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


def test_a_dropped_connection_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stream:
        def __iter__(self) -> Iterator[dict[str, str]]:
            yield {"text": "a" * 100}
            raise ConnectionError("Connection reset by peer\nand much more")

        def state_dict(self) -> dict[str, str]:
            return {}

    monkeypatch.setattr("mesanet.data.hub.HubSource._open", lambda self: Stream())
    monkeypatch.setattr("mesanet.data.hub.HubSource._commit", "1" * 40)
    words = ["data", "prepare", "owner/set", "--out", tmp_path / "out", "--tokenizer", "bytes", "--workers", 0]
    code, errors = _run(capsys, *words)
    assert (code, len(errors.strip().splitlines())) == (2, 1)
    assert "'owner/set' broke off: Connection reset by peer; what is finished is kept: run the same command" in errors


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "data.jsonl", ["a"])
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    code, errors = _run(capsys, "data", "prepare", source, "--out", out, "--tokenizer", "bytes")
    assert code == 2
    assert "holds other files (thesis.tex)" in errors
    assert contents(out) == {"thesis.tex": b"years of work"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 300 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a tmpfs")
def test_a_full_disk(tmp_path: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is finished stays, and with room made the same command goes on to the same result."""
    source = write_lines(tmp_path / "data.jsonl", make_texts(2000))
    words = ["data", "prepare", source, "--tokenizer", "bytes", "--workers", 0, "--shard-tokens", 20_000]
    code, errors = _run(capsys, *words, "--out", small_disk / "out")
    assert code == 2
    assert f"the disk is full at {small_disk / 'out'}" in errors
    assert len(errors.strip().splitlines()) == 1
    finished = list((small_disk / "out").glob("group-*.json"))
    assert finished
    assert not list((small_disk / "out").glob("*.partial"))
    subprocess.run(["mount", "-o", "remount,size=4m", small_disk], check=True)
    assert _run(capsys, *words, "--out", small_disk / "out")[0] == 0
    assert _run(capsys, *words, "--out", tmp_path / "roomy")[0] == 0
    assert contents(small_disk / "out") == contents(tmp_path / "roomy")
