"""Small corpora in every format, prepared once."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from mesanet.config.data import PrepareConfig
from mesanet.data import Dataset, open_dataset, prepare

WORDS = ["mesa", "layer", "of", "the", "ridge", "Übung", "naïve", "数", "x_1 =", "\n", "  ", "don't", "🙂", "12345"]


def make_texts(count: int, seed: int = 0, longest: int = 60) -> list[str]:
    """Different texts of different lengths; a few are empty and a few come twice."""
    random_numbers = random.Random(seed)
    texts = [
        f"{i} " + " ".join(random_numbers.choices(WORDS, k=random_numbers.randint(0, longest))) for i in range(count)
    ]
    return [*texts[: count // 2], "", texts[0], *texts[count // 2 :], texts[count // 3]]


def write_lines(path: Path, texts: list[str], column: str = "text") -> Path:
    path.write_text(
        "".join(json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(texts)), encoding="utf-8"
    )
    return path


def config(*sources: Path | str, out: Path, **options: object) -> PrepareConfig:
    """A configuration for tests: bytes, and everything in this process."""
    defaults: dict[str, object] = {"tokenizer": "bytes", "workers": 0, "validation_fraction": 0.2}
    return PrepareConfig(sources=tuple(map(str, sources)), out=out, **{**defaults, **options})  # type: ignore[arg-type]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return make_texts(200)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    """A prepared folder of several shards; tests that change it copy it first."""
    folder = tmp_path_factory.mktemp("prepared")
    prepare(config(write_lines(folder / "texts.jsonl", texts), out=folder / "out", shard_tokens=5000), quiet=True)
    return folder / "out"


@pytest.fixture(scope="session")
def dataset(prepared: Path) -> Dataset:
    return open_dataset(prepared)
