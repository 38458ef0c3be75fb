"""`mesanet bench op` from the command line to the record and the figure, on sizes that take no time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mesanet.bench import op
from mesanet.bench.op import OpBenchmark, needed_memory, plain_step_operations
from mesanet.cli import main

SMALL = ["--batch", "1", "--heads", "4", "--key-size", "8", "--value-size", "4", "--repeats", "2"]


@pytest.fixture(autouse=True)
def _small_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "MATRIX_SIZE", 64)


def bench(*words: str) -> object:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "op", *words])
    return caught.value.code


def test_record_table_and_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*SMALL, "--lengths", "32", "128", str(2**40), "--max-steps", "5", "--out", str(tmp_path)) == 0
    record = json.loads((tmp_path / "op.json").read_text())
    assert record["settings"]["batch"] == 1
    assert record["machine"]["threads"] == torch.get_num_threads()
    short, long, skipped = record["lengths"]
    assert [short["time"], long["time"]] == [32, 128]
    assert "memory" in skipped["skipped"]
    for row in (short, long):
        assert all(len(seconds) == 4 for seconds in row["seconds"].values())
        assert row["best"] == {name: min(seconds) for name, seconds in row["seconds"].items()}
        assert row["training_ratio"] == pytest.approx(
            row["best"]["mesa forward+backward"] / row["best"]["attention forward+backward"]
        )
        assert len(row["steps_mean_by_head"]) == 4
        assert max(row["steps_max_by_head"]) <= 5
        assert row["plain_share_of_matrix_product"] == pytest.approx(row["plain_gflops"] / row["matrix_product_gflops"])
    assert (tmp_path / "op.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "skipped" in shown
    assert "time(128) / time(32)" in shown


def test_the_heads_can_be_chosen(tmp_path: Path) -> None:
    words = ["--lengths", "64", "--gamma", "1", "1", "--strong-gates", "0.1", "--correlated"]
    assert bench(*SMALL, *words, "--out", str(tmp_path)) == 0
    assert json.loads((tmp_path / "op.json").read_text())["gamma_ranges"] == [[1.0, 1.0]]


def test_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*SMALL, "--lengths", str(2**40), "--out", str(tmp_path)) == 0
    assert "Nothing fitted" in capsys.readouterr().out
    assert not (tmp_path / "op.png").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch", "0"], "batch"),
        (["--lengths", "0"], "lengths"),
        (["--tolerance", "1"], "tolerance"),
        (["--device", "abacus"], "device"),
        (["--device", "meta"], "device"),
        (["--gamma", "0.5", "1.5"], "gamma"),
        (["--strong-gates", "2"], "strong_gates"),
        (["--dtype", "float8"], "dtype"),
    ],
)
def test_bad_options_are_code_2_and_write_nothing(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert bench(*words, "--out", str(out)) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_operations_are_those_of_the_two_products_of_a_step() -> None:
    """Counted by torch itself on one step of one chunk."""
    options = OpBenchmark(batch=2, heads=3, key_size=16)
    chunk, size = 64, 16
    p, keys, state = torch.randn(chunk, size), torch.randn(chunk, size), torch.randn(size, size)
    with FlopCounterMode(display=False) as counter:
        weights = p @ keys.T
        torch.cat((p, weights), dim=-1) @ torch.cat((state, keys))
    assert plain_step_operations(options, 128) == 2 * 3 * 2 * counter.get_total_flops()


def test_more_of_anything_needs_more_memory() -> None:
    usual = needed_memory(OpBenchmark(), 1024)
    assert usual == needed_memory(OpBenchmark(value_size=128), 1024)
    larger = [OpBenchmark(batch=8), OpBenchmark(heads=16), OpBenchmark(key_size=256), OpBenchmark(value_size=256)]
    assert all(needed_memory(options, 1024) > usual for options in larger)
    assert needed_memory(OpBenchmark(), 2048) == 2 * usual
