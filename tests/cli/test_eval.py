"""`mesanet eval` on a model with random weights, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mesanet.cli import main
from mesanet.config.data import PrepareConfig
from mesanet.config.model import ModelConfig
from mesanet.data import prepare
from mesanet.model.backbone import LanguageModel
from mesanet.model.files import save_model

TEXT = "The quick brown fox jumps over the lazy dog. " * 30


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for name in ("mesa", "attention"):
        torch.manual_seed(0)
        config = ModelConfig(mixers=(name,), width=16, layers=1, heads=2, key_size=8, vocabulary=257)
        save_model(LanguageModel(config), tmp_path / name / "model")
    (tmp_path / "book.txt").write_text(TEXT)
    return tmp_path


def call(*words: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def records(run: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted((run / "evaluations").glob("*.json"))]


def test_records_and_tables(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--data", run / "book.txt", "--length", 100, 1000)
    assert call("eval", run / "attention", *words) == 0
    assert call("eval", run / "mesa", *words, "--relative-to", run / "attention") == 0
    out = capsys.readouterr().out
    assert "difference" in out
    assert "512" not in out.splitlines()[0]
    for record in records(run / "mesa"):
        assert record["kind"] == "evaluation"
        assert record["model"]["folder"] == "model"
        assert record["summary"]["tokens"] == len(TEXT) == sum(record["positions"]["count"])
        assert record["data"]["name"] == "book"
        assert len(record["model"]["weights_sha256"]) == 64
        assert record["mesanet"]
        assert record["steps"]["mean"] > 0
    assert not list((run / "mesa" / "evaluations").glob(".*"))


def test_the_solvers_curve_is_one_command_and_is_not_done_twice(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("eval", run / "mesa", "--data", run / "book.txt", "--length", 200)
    words = (*words, "--solver.max-steps", 1, 2, "--solver.tolerance", 0)
    assert call(*words) == 0
    assert {record["steps"]["mean"] for record in records(run / "mesa")} == {1, 2}
    before = [path.stat().st_mtime_ns for path in sorted((run / "mesa" / "evaluations").iterdir())]
    capsys.readouterr()
    assert call(*words) == 0
    assert "was there already" in capsys.readouterr().out
    assert [path.stat().st_mtime_ns for path in sorted((run / "mesa" / "evaluations").iterdir())] == before
    # Other weights are another evaluation.
    save_model(
        LanguageModel(ModelConfig(width=16, layers=1, heads=2, key_size=8, vocabulary=257)), run / "mesa" / "model"
    )
    assert call(*words) == 0
    assert len(records(run / "mesa")) == 4


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("attention", "--data", "book.txt", "--solver.max-steps", "3"), "no mesa layer"),
        (("mesa", "--data", "absent.txt"), "there is no source"),
        (("nothing", "--data", "book.txt"), "no folder"),
        (("mesa", "--data", "book.txt", "--length", "0"), "length: got 0"),
        (("mesa", "--data", "empty.txt"), "is empty"),
        (("mesa", "--data", "book.txt", "--at-least", "5000"), "the longest has 1350 tokens"),
        (("mesa", "--data", "book.txt", "--relative-to", "attention"), "run the same `mesanet eval` on it first"),
        (
            ("mesa", "--data", "book.txt", "--packed", "--max-tokens", "99", "--length", "100"),
            "fewer than a packed window",
        ),
        (("mesa", "--data", "book.txt", "--buckets", "-3"), "buckets: got -3"),
        (("mesa", "--data", "column.jsonl"), "choose one with --text-column"),
        (("mesa", "--data", "other", "--split", "train"), "which is not that of the model (bytes)"),
    ],
)
def test_mistakes(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                  words: tuple[str, ...], sentence: str) -> None:  # fmt: skip
    monkeypatch.chdir(run)
    (run / "empty.txt").write_text("")
    (run / "column.jsonl").write_text('{"content": "abc"}\n')
    if "other" in words:
        pytest.importorskip("tokenizers")
        prepare(PrepareConfig(sources=("book.txt",), out=run / "other", tokenizer="bpe:257", workers=0), quiet=True)
    assert call("eval", *words) == 2
    error = capsys.readouterr().err.strip()
    assert sentence in error
    assert "\n" not in error


def test_a_folder_of_several_runs_is_refused_with_their_names(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of them would be taken, and its record put where no run looks for it."""
    (run / "mesa" / "model").rename(run / "mesa" / "checkpoints")
    asked = ("--data", run / "book.txt")
    assert call("eval", run, *asked) == 2
    error = capsys.readouterr().err
    assert f"is no run but holds 2: name the one that is meant, of {run / 'attention'}, {run / 'mesa'}" in error
    assert not (run / "evaluations").exists()
    assert call("eval", run / "attention", *asked, "--relative-to", run) == 2
    assert "is no run but holds 2" in capsys.readouterr().err


def test_another_run_that_is_not_there_is_met_at_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("eval", run / "mesa", "--data", run / "book.txt", "--relative-to", run / "atention") == 2
    assert "atention" in capsys.readouterr().err
    assert not (run / "mesa" / "evaluations").exists()


@pytest.mark.parametrize("part", ["summary", "settings"])
def test_a_record_that_lacks_something_is_refused_by_name(
    run: Path, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("eval", run / "mesa", "--data", run / "book.txt", "--length", 200)
    assert call(*asked) == 0
    (path,) = (run / "mesa" / "evaluations").iterdir()
    record = json.loads(path.read_text())
    del record[part]
    path.write_text(json.dumps(record))
    assert call(*asked) == 2
    assert f"{path.name} is damaged: it has no '{part}'" in capsys.readouterr().err
    assert call(*asked, "--again") == 0
    assert part in json.loads(path.read_text())


def test_how_text_is_read_can_be_said(run: Path) -> None:
    (run / "column.jsonl").write_text('{"content": "abc"}\n{"content": "defg"}\n')
    (run / "parts.txt").write_text("abc@@defg")
    assert call("eval", run / "mesa", "--data", run / "column.jsonl", "--text-column", "content") == 0
    assert call("eval", run / "mesa", "--data", run / "parts.txt", "--separator", "@@") == 0
    first, second = records(run / "mesa")
    assert first["windows"]["tokens"] == second["windows"]["tokens"] == [3, 4]
    assert first["windows"]["nll"] == pytest.approx(second["windows"]["nll"])


def test_prepared_data_of_the_models_tokenizer(run: Path) -> None:
    out = run / "own"
    prepare(PrepareConfig(sources=(str(run / "book.txt"),), out=out, tokenizer="bytes", workers=0), quiet=True)
    assert call("eval", run / "mesa", "--data", out, "--split", "train", "--length", 100) == 0
    assert records(run / "mesa")[0]["summary"]["tokens"] == len(TEXT)
