"""The measurement of a preparation's speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.data.conftest import make_texts, write_lines

from mesanet.cli import main


def test_a_tokenizer_that_is_trained_on_the_sources(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    source = write_lines(tmp_path / "texts.jsonl", make_texts(300))
    words = ["data", "speed", str(source), "--tokenizer", "bpe:300", "--workers", "0", "--repeats", "1"]
    with pytest.raises(SystemExit) as caught:
        main([*words, "--out", str(tmp_path / "speed.json")])
    assert caught.value.code == 0
    record = json.loads((tmp_path / "speed.json").read_text())
    assert record["tokenizer"] == "bpe:300"
    assert 0 < record["tokens"] < record["bytes"]


def test_a_record_of_the_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "texts.jsonl", make_texts(300))
    words = ["data", "speed", str(source), "--tokenizer", "bytes", "--workers", "0", "--repeats", "2"]
    with pytest.raises(SystemExit) as caught:
        main([*words, "--out", str(tmp_path / "speed.json")])
    assert caught.value.code == 0
    record = json.loads((tmp_path / "speed.json").read_text())
    assert len(record["trials"]) == 2
    assert record["tokens"] == record["bytes"]
    assert record["best"]["tokens_per_second"] == max(trial["tokens_per_second"] for trial in record["trials"])
    assert record["best"] in record["trials"]
    assert "tokens/s" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"texts.jsonl", "speed.json"}
