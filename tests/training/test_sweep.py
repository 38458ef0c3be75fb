from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.training.tiny import losses, tiny_run

from mesanet.config.sweep import SweepConfig
from mesanet.config.training import RunConfig
from mesanet.errors import UserError
from mesanet.training.presets import GRIDS, paper
from mesanet.training.records import Records
from mesanet.training.sweep import Trial, grid, sweep, table


def test_a_sweep_trains_each_pair_once_and_counts_what_diverged(tiny_data: Path, tmp_path: Path) -> None:
    asked: list[str] = []

    def base(mixers: str) -> RunConfig:
        asked.append(mixers)
        config = tiny_run(tiny_data, layers=2, steps=6, start_learning_rate=1e-3)
        return replace(config, model=replace(config.model, mixers=tuple(mixers.split("-"))))

    config = SweepConfig(mixers=("gla", "gla-attention"), learning_rates=(1e30, 1e-2), out=tmp_path)
    trials = sweep(config, base, quiet=True)
    assert [(trial.mixers, trial.learning_rate) for trial in trials] == [
        ("gla", 1e30),
        ("gla", 1e-2),
        ("gla-attention", 1e30),
        ("gla-attention", 1e-2),
    ]
    assert [trial.loss is None for trial in trials] == [True, False, True, False]
    assert trials[1].loss == losses(tmp_path / "gla" / "0.01", "validation")[-1]
    assert json.loads((tmp_path / "sweep.json").read_text()) == [vars(trial) for trial in trials]
    assert (tmp_path / "sweep.md").read_text() == table(trials) + "\n"
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("model.safetensors")}
    assert sweep(config, base, quiet=True) == trials
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("model.safetensors")} == stamps


def test_a_second_sweep_adds_to_the_table(tiny_data: Path, tmp_path: Path) -> None:
    def base(mixers: str, **settings: Any) -> RunConfig:
        return tiny_run(tiny_data, mixers=tuple(mixers.split("-")), steps=4, **settings)

    (first,) = sweep(SweepConfig(mixers=("gla",), learning_rates=(1e-2,), out=tmp_path), base, quiet=True)
    more = SweepConfig(mixers=("hawk,gla",), learning_rates=(1e-3,), out=tmp_path)
    trials = sweep(more, base, quiet=True)
    assert trials[0] == first
    assert [(trial.mixers, trial.learning_rate) for trial in trials[1:]] == [("hawk", 1e-3), ("gla", 1e-3)]
    assert json.loads((tmp_path / "sweep.json").read_text()) == [vars(trial) for trial in trials]
    # Rows of one table are of one setting.
    other = partial(base, clip_norm=0.1)
    with pytest.raises(UserError, match=r"another config: training\.clip_norm is 1\.0 there and 0\.1 here"):
        sweep(SweepConfig(mixers=("attention",), learning_rates=(1e-3,), out=tmp_path), other, quiet=True)
    assert not (tmp_path / "attention").exists()


def test_rates_that_differ_late_are_two_runs_and_one_that_is_removed_is_made_anew(
    tiny_data: Path, tmp_path: Path
) -> None:
    def base(mixers: str) -> RunConfig:
        return tiny_run(tiny_data, mixers=(mixers,), steps=4)

    rates = (0.0012345671, 0.0012345672)
    config = SweepConfig(mixers=("gla",), learning_rates=rates, out=tmp_path)
    trials = sweep(config, base, quiet=True)
    assert [trial.out for trial in trials] == ["gla/0.0012345671", "gla/0.0012345672"]
    assert "| mixer | 0.0012345671 | 0.0012345672 |" in table(trials)
    shutil.rmtree(tmp_path / trials[0].out)
    assert sweep(replace(config, learning_rates=rates[1:]), base, quiet=True) == trials[1:]
    assert sorted(sweep(config, base, quiet=True), key=lambda trial: trial.learning_rate) == trials


def test_the_table_marks_the_best_of_each_row() -> None:
    trials = [
        Trial(mixers=name, learning_rate=rate, loss=loss, out="")
        for name, rate, loss in (("mesa", 0.002, 2.5), ("mesa", 0.001, 2.25), ("gla", 0.001, None))
    ]
    assert table(trials).splitlines() == [
        "| mixer | 0.001 | 0.002 |",
        "|---|---:|---:|",
        "| mesa | **2.2500** | 2.5000 |",
        "| gla | diverged |  |",
    ]


@pytest.mark.parametrize("billions", [15, 50])
def test_the_papers_grid_goes_with_the_length(billions: int) -> None:
    assert grid(paper("small", billions)) == GRIDS[billions]


def test_a_divergence_with_other_settings_is_refused(tiny_data: Path, tmp_path: Path) -> None:
    """A dump in the folder counts for the run that made it alone, however that was spread over processes."""
    config = SweepConfig(mixers=("gla",), learning_rates=(1e30,), out=tmp_path)

    def base(**settings: Any) -> Callable[[str], RunConfig]:
        return lambda mixers: tiny_run(tiny_data, mixers=(mixers,), steps=6, start_learning_rate=1e-3, **settings)

    (diverged,) = sweep(config, base(), quiet=True)
    assert diverged.loss is None
    assert sweep(config, base(accumulation=2), quiet=True) == [diverged]
    with pytest.raises(UserError, match=r"another config: training\.clip_norm is 1\.0 there and 0\.1 here"):
        sweep(config, base(clip_norm=0.1), quiet=True)


def test_ctrl_c_after_the_last_update_of_a_run_ends_the_sweep(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SweepConfig(mixers=("gla",), learning_rates=(1e-2, 2e-2), out=tmp_path)
    write = Records.write

    def write_then_signal(records: Records, record: dict[str, object]) -> None:
        write(records, record)
        if record["step"] == 6 and record["kind"] == "train":
            os.kill(os.getpid(), signal.SIGINT)

    def base(mixers: str) -> RunConfig:
        return tiny_run(tiny_data, mixers=(mixers,), steps=6)

    monkeypatch.setattr(Records, "write", write_then_signal)
    with pytest.raises(KeyboardInterrupt):
        sweep(config, base, quiet=True)
    assert not (tmp_path / "gla" / "0.02").exists()
    monkeypatch.undo()
    trials = sweep(config, base, quiet=True)
    for trial in trials:
        assert [trial.loss] == losses(tmp_path / trial.out, "validation")
