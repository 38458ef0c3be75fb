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

psutil = pytest.importorskip("psutil")

MEBIBYTE = 1 << 20


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


def _huge_records(path: Path) -> Path:
    """Records of 15 MiB, nearly the longest that are accepted, in characters of two bytes and more."""
    with path.open("w", encoding="utf-8") as file:
        for i in range(16):
            file.write(json.dumps({"text": f"{i} é 🙂 {_sentences(15 * MEBIBYTE, i)}"}, ensure_ascii=False) + "\n")
    return path


def _one_text(path: Path) -> Path:
    with path.open("w") as file:
        for i in range(10):
            file.write(_sentences(30 * MEBIBYTE, i))
    return path


def _one_row_group(path: Path) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    text = _sentences(3000, 1)
    table = pyarrow.table({"text": [f"{i} {text}" for i in range(100_000)]})
    parquet.write_table(table, path, row_group_size=100_000, use_dictionary=False)
    return path


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
        ("huge.jsonl", _huge_records),
        ("one.txt", _one_text),
        ("group.parquet", _one_row_group),
    ],
)
def test_memory_has_a_bound(tmp_path: Path, name: str, write: Callable[[Path], Path]) -> None:
    """Each source is of 240 MiB and more, which no part of the way may hold at once."""
    source = write(tmp_path / name)
    assert source.stat().st_size > 200 * MEBIBYTE or name.endswith(".parquet")
    words = ["data", "prepare", str(source), "--out", str(tmp_path / "out"), "--workers", "2"]
    process = subprocess.Popen([sys.executable, "-m", "mesanet", *words], stderr=subprocess.DEVNULL)
    peak = _peak(process)
    assert process.returncode == 0
    print(f"{name}: {peak / MEBIBYTE:.0f} MiB")
    assert peak < 1024 * MEBIBYTE
