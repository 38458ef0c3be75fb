from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import pytest

from mesanet.config.base import ConfigError
from mesanet.config.data import DataConfig
from mesanet.config.training import RunConfig, TrainingConfig
from mesanet.training.presets import GRIDS, RUNS, paper, run_preset
from mesanet.training.schedule import learning_rate


def test_corners_of_the_papers_schedule() -> None:
    """From 1e-6 up to the peak in 2000 steps, and down to a tenth of it at the very end."""
    config = TrainingConfig(steps=28_000, peak_learning_rate=3e-3)
    assert learning_rate(config, 28_000, 0) == 1e-6
    assert learning_rate(config, 28_000, 2000) == 3e-3
    assert learning_rate(config, 28_000, 27_999) == pytest.approx(3e-4, rel=1e-12)
    # Half-way up the line, and half-way down the cosine.
    assert learning_rate(config, 28_000, 1000) == pytest.approx((1e-6 + 3e-3) / 2, rel=1e-12)
    assert learning_rate(config, 28_001, 15_000) == pytest.approx((3e-3 + 3e-4) / 2, rel=1e-12)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (2, 1), (5, 4), (10, 0), (50, 7)])
def test_it_rises_then_falls_and_stays_in_its_range(steps: int, warmup: int) -> None:
    config = TrainingConfig(steps=steps, warmup_steps=warmup, peak_learning_rate=1e-2)
    rates = [learning_rate(config, steps, step) for step in range(steps)]
    assert all(1e-6 <= rate <= 1e-2 * (1 + 1e-15) for rate in rates)
    assert rates[: warmup + 1] == sorted(rates[: warmup + 1])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert math.isclose(rates[-1], 1e-3, rel_tol=1e-12) or warmup == steps - 1


def test_the_length_follows_from_the_tokens() -> None:
    assert paper("small", 15).steps == 15 * 10**9 // (256 * 2048)
    assert paper("small", 15).training.peak_learning_rate == 0.003
    assert paper("large", 50, "hawk-mesa").training.peak_learning_rate == 0.00085
    assert paper("medium", 15, "sliding_window").training.peak_learning_rate == 0.001


PAPER = """
size    b  attention mamba2  gla     mlstm   deltanet gated_deltanet hawk    hawk-mesa mesa
small  15  0.0025    0.003   0.002   0.0025  0.003    0.001          0.002   0.0025    0.003
small  50  0.003     0.001   0.001   0.001   0.001    0.001          0.001   0.001     0.00095
medium 15  0.0015    0.0025  0.0025  0.003   0.003    0.0025         0.0025  0.002     0.0025
medium 50  0.001     0.001   0.00095 0.0009  0.00085  0.00095        0.0009  0.0009    0.001
large  15  0.002     0.002   0.002   0.0015  0.0015   0.002          0.002   0.002     0.002
large  50  0.0008    0.0009  0.00085 0.0008  0.0008   0.0009         0.0009  0.00085   0.00085
"""


def test_the_papers_rates_are_those_of_its_table() -> None:
    """Its table of peak learning rates, by size and billions of tokens, whose layers go by their names here."""
    (_, _, *names), *rows = (line.split() for line in PAPER.strip().splitlines())
    assert len(rows) == 6
    for size, billions, *rates in rows:
        for name, rate in zip(names, rates, strict=True):
            assert paper(size, int(billions), name).training.peak_learning_rate == float(rate), (size, billions, name)
            # All but one are from the grid that was scanned.
            in_grid = float(rate) in GRIDS[int(billions)]
            assert in_grid or (size, billions, name) == ("small", "50", "attention")


@pytest.mark.parametrize("name", RUNS)
def test_every_preset_is_a_run(name: str) -> None:
    config = run_preset(name, "gla")
    assert config.model.mixers == ("gla",)
    assert config.training.betas == (0.9, 0.98)
    assert (config.training.weight_decay, config.training.epsilon, config.training.clip_norm) == (0.1, 1e-8, 1.0)


def test_misspelt_names_get_a_suggestion() -> None:
    with pytest.raises(ValueError, match="did you mean 'small-15b'"):
        run_preset("small-15B")
    with pytest.raises(ValueError, match="did you mean 'mesa'"):
        run_preset("demo", "messa")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "steps: got None with tokens None, expected exactly one"),
        ({"steps": 3, "tokens": 3}, "steps: got 3 with tokens 3, expected exactly one"),
        ({"steps": 0}, "steps: got 0"),
        ({"steps": 3, "betas": (0.9, 1.0)}, r"betas\[1\]: got 1.0"),
        ({"steps": 3, "peak_learning_rate": -1.0}, "peak_learning_rate: got -1.0, expected a positive number"),
        ({"steps": 3, "precision": "float16"}, "precision: got 'float16'"),
        ({"steps": 3, "keep": 0}, "keep: got 0"),
        ({"steps": 3, "weight_decay": math.inf}, "weight_decay: got inf, expected a number in"),
        ({"steps": 3, "weight_decay": math.nan}, "weight_decay: got nan"),
    ],
)
def test_bad_settings_name_the_field(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainingConfig(**settings)  # type: ignore[arg-type]


def test_a_warmup_that_never_ends_is_refused() -> None:
    data = DataConfig(path=paper("small", 15).data.path)
    with pytest.raises(ConfigError, match=r"training.warmup_steps: got 2000, expected fewer than the 100 steps"):
        RunConfig(data=data, training=TrainingConfig(steps=100))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_of_sixteen_bits_are_not_trained(dtype: Literal["bfloat16", "float16"]) -> None:
    run = paper("small", 15)
    with pytest.raises(ConfigError, match=rf"model.dtype: got '{dtype}'.*training.precision='bfloat16'"):
        replace(run, model=replace(run.model, dtype=dtype))
