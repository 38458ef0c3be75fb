"""A comparison of models so small that all of it takes a few seconds; as a script, the command line with it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.training.tiny import tiny_run

from mesanet.config.compare import CompareConfig
from mesanet.config.training import RunConfig
from mesanet.presets import Pattern, pattern
from mesanet.training.presets import RUNS

SETTINGS: dict[str, Any] = {
    "tokens": 512,
    "longest": 2,
    "longest_tokens": 512,
    "solver_steps": (0, 2),
    "solver_tolerances": (0.1,),
    "solver_tokens": 128,
    "sample_tokens": 4,
    "prompt": "mesa",
}


def add_preset(data: Path) -> None:
    """Let `tiny` name a run on these data, in float64, so that only a mistake can make a difference."""

    def tiny(mixers: Pattern = "mesa") -> RunConfig:
        run = tiny_run(data, mixers=pattern(mixers))
        return replace(run, model=replace(run.model, dtype="float64"))

    RUNS["tiny"] = tiny


def tiny_comparison(out: Path, **changes: Any) -> CompareConfig:
    """Two models with a few steps of training."""
    return CompareConfig(**{"preset": "tiny", "mixers": ("mesa", "attention"), "out": out, **SETTINGS, **changes})


if __name__ == "__main__":
    from mesanet.cli import main
    from mesanet.compare import presets

    add_preset(Path(sys.argv[1]))
    presets.SMALL["tiny"] = SETTINGS
    main(sys.argv[2:])
