"""`bpe:N`: a preparation that trains its own tokenizer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.data.conftest import contents, write_lines

from mesanet.config.data import PrepareConfig, TokenizerConfig
from mesanet.data.dataset import open_dataset
from mesanet.data.preparation import prepare
from mesanet.data.tokenizer_training import tokenizer_of_sources, train_tokenizer
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
    ("changes", "sentence"),
    [
        ({"tokenizer": "bpe:many"}, "expected a vocabulary after bpe:"),
        ({"tokenizer": "bpe:3"}, "vocabulary: got 3"),
        ({"bos_token": "<s>"}, "the tokenizer bpe:270 has its own BOS; leave --bos-token out"),
    ],
)
def test_mistakes(tmp_path: Path, changes: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        prepare(settings(tmp_path, **changes), quiet=True)
    assert not (tmp_path / "out").exists()


KILLED = """
import os, signal, sys
from mesanet.cli import main
from mesanet.data.preparation import _Preparation

def killed(self, position, seen):
    self._worker_tokenizer()
    os.kill(os.getpid(), signal.SIGKILL)

_Preparation._read = killed
main(sys.argv[1:])
"""


def leave_behind(text: Path, out: Path) -> None:
    """What a preparation leaves that is killed before it has finished its first shard."""
    words = ["data", "prepare", str(text), "--out", str(out), "--tokenizer", "bpe:270", "--workers", "0"]
    assert subprocess.run([sys.executable, "-c", KILLED, *words], check=False).returncode == -9
    assert {"tokenizer.json", "preparation.json"} <= contents(out).keys()


@pytest.mark.parametrize("tokenizer", ["bpe:270", "bytes"])
def test_another_preparation_after_a_kill_takes_nothing_over(tmp_path: Path, tokenizer: str) -> None:
    other = tmp_path / "other.txt"
    other.write_text("uno dos tres cuatro cinco seis siete ocho nueve diez. " * 40)
    leave_behind(other, tmp_path / "out")
    prepare(settings(tmp_path, tokenizer=tokenizer), quiet=True)
    prepare(settings(tmp_path, tokenizer=tokenizer, out=tmp_path / "fresh"), quiet=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")
    dataset = open_dataset(tmp_path / "out")
    assert dataset.tokenizer().decode(dataset.train[0]) == (tmp_path / "text.txt").read_text()


def test_the_same_preparation_after_a_kill_keeps_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings(tmp_path)
    leave_behind(tmp_path / "text.txt", tmp_path / "out")
    prepare(settings(tmp_path, out=tmp_path / "fresh", validation_fraction=0.01), quiet=True)

    def trained_again(*_: object, **__: object) -> None:
        raise AssertionError("the tokenizer is there already")

    monkeypatch.setattr("mesanet.data.preparation.tokenizer_of_sources", trained_again)
    prepare(settings(tmp_path, validation_fraction=0.01), quiet=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_every_option_of_reading_reaches_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer of `bpe:N` is the one that `mesanet data tokenizer` trains with the same options."""
    text = tmp_path / "split.txt"
    text.write_text("".join(f"one {n} two@@three four" for n in range(300)))
    options = {"separator": "@@", "document_bytes": 2048}
    config = settings(tmp_path, sources=(str(text),), **options)
    given = TokenizerConfig(sources=(str(text),), out=tmp_path / "t.json", vocabulary=270, **options)
    assert tokenizer_of_sources(config, quiet=True).definition() == train_tokenizer(given, quiet=True).definition()
    seen: list[PrepareConfig] = []

    def spy(asked: PrepareConfig) -> list[object]:
        seen.append(asked)
        raise UserError("seen")

    monkeypatch.setattr("mesanet.data.tokenizer_training.find_sources", spy)
    hub = {"hub_config": "de", "hub_split": "validation", "hub_revision": "abc", "text_column": "content"}
    with pytest.raises(UserError, match="seen"):
        tokenizer_of_sources(settings(tmp_path, **hub, **options), quiet=True)
    for name, value in {**hub, **options}.items():
        assert getattr(seen[0], name) == value


def test_training_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = write_lines(tmp_path / "lines.jsonl", ["the cat sat on the mat and the cat ate the rat. " * 40])
    train_tokenizer(TokenizerConfig(sources=(str(lines),), out=tmp_path / "t.json", vocabulary=270))
    assert capfd.readouterr() == ("", "")
