"""`mesanet bench loader` from the command line to the record, on a run that takes no time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.training.tiny import prepare_tiny

from mesanet.bench.loader import LoaderBenchmark, SameAgain
from mesanet.cli import main
from mesanet.data import make_batches, open_dataset


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_tiny(tmp_path_factory.mktemp("tiny"))


def bench(*words: str) -> object:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "loader", *words])
    return caught.value.code


def test_a_record_of_both(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["demo", "--width", "16", "--layers", "1", "--key-size", "4"]
    batches = ["--data", str(data), "--length", "16", "--batch", "2", "--steps", "3", "--repeats", "2"]
    words = ["--preset", *model, "--mixers", "gla", *batches, "--out", str(tmp_path / "loader.json")]
    assert bench(*words) == 0
    record = json.loads((tmp_path / "loader.json").read_text())
    assert record["command"] == " ".join(["mesanet", "bench", "loader", *words])
    assert (record["run"]["model"]["width"], record["run"]["model"]["vocabulary"]) == (16, 257)
    assert (record["run"]["data"]["sequence_length"], record["run"]["data"]["batch_size"]) == (16, 2)
    held, loaded = (record["seconds_per_step"][name] for name in ("held", "loaded"))
    assert len(held) == len(loaded) == 2
    ratios = sorted(ours / theirs for ours, theirs in zip(loaded, held, strict=True))
    assert record["added"] == pytest.approx(sum(ratios) / 2 - 1)
    assert record["added_to_best"] == pytest.approx(min(loaded) / min(held) - 1)
    assert len(record["batch_seconds"]) == 3
    assert 0 < record["waiting_seconds_per_step"] < 1
    assert "the loader adds" in capsys.readouterr().out


def test_both_see_the_same_batches(data: Path) -> None:
    options = LoaderBenchmark(preset="demo", data=data, length=16, batch=2)
    dataset = open_dataset(data)
    batches = make_batches(dataset, options.run(dataset.vocabulary).data)
    again = SameAgain(batches, 3)
    for step in range(7):
        assert np.array_equal(again.batch(step).tokens, batches.batch(step % 3).tokens)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--preset", "abacus"], "preset"),
        (["--mixers", "abacus"], "abacus"),
        (["--steps", "0"], "steps: got 0"),
        (["--width", "-2"], "width: got -2"),
        (["--data", "absent"], "absent is no prepared data"),
    ],
)
def test_mistakes_are_code_2_and_write_nothing(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bench(*words) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
