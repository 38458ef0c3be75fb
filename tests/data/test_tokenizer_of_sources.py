"""`bpe:N`: a preparation that trains its own tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from mesanet.config.data import PrepareConfig
from mesanet.data.dataset import open_dataset
from mesanet.data.preparation import prepare
from mesanet.errors import UserError

pytest.importorskip("tokenizers")


def settings(folder: Path, **changes: object) -> PrepareConfig:
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("the cat sat on the mat and the cat ate the rat. " * 40)
    given = {"sources": (str(text),), "out": folder / "out", "tokenizer": "bpe:270", "validation_fraction": 0.0}
    return PrepareConfig(**{**given, **changes})  # type: ignore[arg-type]


def test_the_tokenizer_comes_from_the_sources(tmp_path: Path) -> None:
    prepare(settings(tmp_path), quiet=True)
    dataset = open_dataset(tmp_path / "out")
    assert dataset.vocabulary == 270
    assert dataset.tokenizer().decode(dataset.train[0]) == (tmp_path / "text.txt").read_text()
    assert dataset.train.tokens < (tmp_path / "text.txt").stat().st_size


def test_the_same_command_again_changes_nothing(tmp_path: Path) -> None:
    first = prepare(settings(tmp_path), quiet=True)
    assert prepare(settings(tmp_path), quiet=True) == first
    again = settings(tmp_path, out=tmp_path / "again")
    prepare(again, quiet=True)
    assert open_dataset(tmp_path / "again").fingerprint == open_dataset(tmp_path / "out").fingerprint


def test_another_vocabulary_is_another_preparation(tmp_path: Path) -> None:
    prepare(settings(tmp_path), quiet=True)
    with pytest.raises(UserError, match="holds another preparation"):
        prepare(settings(tmp_path, tokenizer="bpe:265"), quiet=True)


@pytest.mark.parametrize(
    ("name", "sentence"), [("bpe:many", "expected a vocabulary after bpe:"), ("bpe:3", "vocabulary: got 3")]
)
def test_mistakes(tmp_path: Path, name: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        prepare(settings(tmp_path, tokenizer=name), quiet=True)
    assert not (tmp_path / "out").exists()
