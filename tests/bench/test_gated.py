"""`mesanet bench gated` from the command line to the record and the figure, on sizes that take no time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mesanet.bench.gated import OPS, GatedBenchmark, callables, needed_memory
from mesanet.cli import main

SMALL = ["--batch", "1", "--heads", "4", "--key-size", "8", "--repeats", "2"]


def bench(*words: str) -> object:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "gated", *words])
    return caught.value.code


def test_record_table_and_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert bench(*SMALL, "--lengths", "96", "32", str(2**40), "--out", str(tmp_path)) == 0
    record = json.loads((tmp_path / "gated.json").read_text())
    short, long = record["lengths"]
    assert [short["time"], long["time"]] == [32, 96]
    assert record["skipped"] == [2**40]
    assert set(short["best"]) == {*OPS, "sdpa", "transformers"}
    assert set(long["best"]) == {*OPS, "sdpa"}
    for row in (short, long):
        assert all(len(seconds) == 4 for seconds in row["seconds"].values())
        assert row["best"] == {name: min(seconds) for name, seconds in row["seconds"].items()}
    assert (tmp_path / "gated.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "time(96) / time(32)" in shown
    assert "times as fast as that of transformers" in shown


def test_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*SMALL, "--lengths", str(2**40), "--out", str(tmp_path)) == 0
    assert "Nothing fitted" in capsys.readouterr().out
    assert not (tmp_path / "gated.png").exists()


def test_every_callable_gives_the_gradients_of_all_that_it_reads() -> None:
    """Else a benchmark would compare more work with less."""
    options = GatedBenchmark(batch=1, heads=4, key_size=8)
    expected = {"gla": 5, "mamba2": 4, "deltanet": 4, "gated_deltanet": 5, "mlstm": 5, "rg_lru": 2, "longhorn": 4}
    expected |= {"mesa": 6, "sdpa": 3}
    found = {name: run() for name, run in callables(options, 32, ("sdpa",), torch.device("cpu")).items()}
    assert {name: len(gradients) for name, gradients in found.items()} == expected  # type: ignore[arg-type]
    assert all(gradient.abs().sum() > 0 for gradients in found.values() for gradient in gradients)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ops", "gla", "abacus"], "ops[1]"),
        (["--peers", "abacus"], "peers[0]"),
        (["--lengths", "0"], "lengths"),
        (["--device", "abacus"], "device"),
    ],
)
def test_bad_options_are_code_2_and_write_nothing(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert bench(*words, "--out", str(out)) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_more_of_anything_needs_more_memory() -> None:
    usual = needed_memory(GatedBenchmark(), 1024)
    larger = [GatedBenchmark(batch=8), GatedBenchmark(heads=16), GatedBenchmark(key_size=256)]
    assert all(needed_memory(options, 1024) > usual for options in larger)
