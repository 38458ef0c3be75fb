"""Under 1 GiB of memory for all processes together, however big the source is and however it is laid out."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mesanet.data.documents import LONGEST

psutil = pytest.importorskip("psutil")

MEBIBYTE = 1 << 20
HUGE = LONGEST - MEBIBYTE // 8


def _sentences(size: int, seed: int) -> str:
    """Words that no tokenizer has seen together, of about `size` bytes."""
    random_numbers = random.Random(seed)
    words = ["".join(random_numbers.choices("etaoinshrdlu", k=random_numbers.randint(1, 9))) for _ in range(5000)]
    part = " ".join(random_numbers.choices(words, k=MEBIBYTE // 8)) + "\n"
    return part * (size // len(part)) + part[: size % len(part)]


def _small_records(path: Path) -> Path:
    text = _sentences(2000, 1)
    with path.open("w") as file:
        for i in range(150_000):
            file.write(json.dumps({"text": f"{i} {text}"}) + "\n")
    return path


def _huge_words(path: Path) -> Path:
    """Records nearly as long as is accepted, in characters of two bytes and more."""
    return _huge_records(path, 40, lambda number: f"é 🙂 {_sentences(HUGE, number)}")


def _huge_spaces(path: Path) -> Path:
    return _huge_records(path, 40, lambda number: " " * HUGE)


def _huge_letters(path: Path) -> Path:
    """No space anywhere: one word for the tokenizer."""
    return _huge_records(path, 4, lambda number: "".join(random.Random(number).choices("acgt", k=HUGE)))


def _huge_han(path: Path) -> Path:
    """Characters of three bytes, most of which are three tokens."""
    characters = list(map(chr, range(0x4E00, 0x9FA5)))
    return _huge_records(path, 40, lambda number: "".join(random.Random(number).choices(characters, k=HUGE // 3)))


def _huge_records(path: Path, count: int, text: Callable[[int], str]) -> Path:
    with path.open("w", encoding="utf-8") as file:
        for i in range(count):
            file.write(json.dumps({"text": f"{i} {text(i)}"}, ensure_ascii=False) + "\n")
    return path


def _huge_rows(path: Path) -> Path:
    return _rows(path, [f"{i} {_sentences(HUGE, i)}" for i in range(40)])


def _huge_rows_of_spaces(path: Path) -> Path:
    return _rows(path, [f"{i} {' ' * HUGE}" for i in range(40)])


def _clustered_rows(path: Path) -> Path:
    """Long rows behind so many short ones that about a thousand rows should be a mebibyte."""
    return _rows(path, [str(i) for i in range(200_000)] + [f"{i} {_sentences(MEBIBYTE, i)}" for i in range(150)])


def _rows(path: Path, texts: list[str]) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    # A page is read as a whole, and by default is of a thousand rows, however long they are.
    options = {"use_dictionary": False, "write_batch_size": 16}
    parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=len(texts), **options)
    return path


def _one_text(path: Path) -> Path:
    with path.open("w") as file:
        for i in range(10):
            file.write(_sentences(30 * MEBIBYTE, i))
    return path


def _one_row_group(path: Path) -> Path:
    text = _sentences(3000, 1)
    return _rows(path, [f"{i} {text}" for i in range(100_000)])


def _peak(process: subprocess.Popen[bytes]) -> int:
    """The most memory that a process and its children held at once."""
    peak = 0
    watched = psutil.Process(process.pid)
    while process.poll() is None:
        total = 0
        try:
            for one in [watched, *watched.children(recursive=True)]:
                total += one.memory_info().rss
        except psutil.NoSuchProcess:
            continue
        peak = max(peak, total)
        time.sleep(0.01)
    return peak


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("small.jsonl", _small_records),
        ("words.jsonl", _huge_words),
        ("spaces.jsonl", _huge_spaces),
        ("letters.jsonl", _huge_letters),
        ("han.jsonl", _huge_han),
        ("one.txt", _one_text),
        ("group.parquet", _one_row_group),
        ("words.parquet", _huge_rows),
        ("spaces.parquet", _huge_rows_of_spaces),
        ("clustered.parquet", _clustered_rows),
    ],
)
def test_memory_has_a_bound(tmp_path: Path, name: str, write: Callable[[Path], Path]) -> None:
    """Each source is of 150 MiB and more, which no part of the way may hold; letters take long and are fewer."""
    source = write(tmp_path / name)
    assert source.stat().st_size > 150 * MEBIBYTE or name.endswith(".parquet") or name == "letters.jsonl"
    words = ["data", "prepare", str(source), "--out", str(tmp_path / "out"), "--workers", "2"]
    process = subprocess.Popen([sys.executable, "-m", "mesanet", *words], stderr=subprocess.DEVNULL)
    peak = _peak(process)
    assert process.returncode == 0
    print(f"{name}: {peak / MEBIBYTE:.0f} MiB")
    assert peak < 1024 * MEBIBYTE
