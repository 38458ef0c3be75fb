"""Comparisons by name: which mixers, and how much evaluation fits the size of the training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mesanet.config.compare import CompareConfig

DEMO_MIXERS = ("mesa", "attention", "gated_deltanet")
SMALL: dict[str, dict[str, Any]] = {
    "demo": {
        "tokens": 1 << 15,
        "longest_tokens": 1 << 15,
        "solver_tokens": 1 << 13,
        "solver_steps": (0, 1, 2, 4, 8, 16),
        "solver_tolerances": (0.5, 0.1, 1e-2, 1e-4),
        "sample_tokens": 150,
        "prompt": "class Queue:\n    def ",
    },
    "laptop": {
        "tokens": 1 << 17,
        "longest_tokens": 1 << 17,
        "solver_tokens": 1 << 15,
        "prompt": "class Queue:\n    def ",
    },
}
"""Settings other than the defaults, by the preset of training."""


def compare_preset(name: str, out: Path) -> CompareConfig:
    """The comparison that belongs to a training preset: all mixers, but three for the demo."""
    from mesanet.mixers import MIXERS

    mixers = DEMO_MIXERS if name == "demo" else (*(mixer for mixer in MIXERS if mixer != "mesa_rls"), "hawk-mesa")
    return replace(CompareConfig(preset=name, mixers=mixers, out=out), **SMALL.get(name, {}))
