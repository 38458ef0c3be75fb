"""Named models: functions that return a config."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from mesanet.config.model import ModelConfig, takes_signed_gates

Pattern = str | tuple[str, ...]


def small(mixers: Pattern = "mesa") -> ModelConfig:
    """The paper's 140M size: 14 blocks of width 768, 6 heads."""
    return ModelConfig(mixers=pattern(mixers), layers=14, width=768, heads=6)


def medium(mixers: Pattern = "mesa") -> ModelConfig:
    """The paper's 440M size: 28 blocks of width 1024, 8 heads."""
    return ModelConfig(mixers=pattern(mixers), layers=28, width=1024, heads=8)


def large(mixers: Pattern = "mesa") -> ModelConfig:
    """The paper's 940M size: 28 blocks of width 1536, 12 heads."""
    return ModelConfig(mixers=pattern(mixers), layers=28, width=1536, heads=12)


def parity(mixers: Pattern = "mesa") -> ModelConfig:
    """The paper's state-tracking model: forget gates in (-1, 1) and a regulariser so strong that mesa acts like GLA.

    Patterns with a mixer that has no such gates, which the others are compared with, keep what they have.
    """
    signed = all(takes_signed_gates(mixer) for mixer in pattern(mixers))
    return ModelConfig(
        mixers=pattern(mixers),
        layers=2,
        width=128,
        heads=4,
        vocabulary=2,
        gamma_range="signed" if signed else "positive",
        gamma_cap=1.0,
        ridge_initial=50.0,
        ridge_lower_bound=49.0,
        forget_bias=(0.0, 0.0),
    )


def mad(mixers: Pattern = "mesa", vocabulary: int = 16) -> ModelConfig:
    """The model of the MAD benchmark: 2 blocks of width 128, 8 heads of key size 16."""
    return ModelConfig(
        mixers=pattern(mixers), layers=2, width=128, heads=8, key_size=16, vocabulary=vocabulary, window=64
    )


MODELS: dict[str, Callable[[Pattern], ModelConfig]] = {
    "small": small,
    "medium": medium,
    "large": large,
    "parity": parity,
    "mad": mad,
}
SIZES = ("small", "medium", "large")
"""The sizes of the paper's language models."""


def model(name: str, mixers: Pattern = "mesa") -> ModelConfig:
    """The model preset of this name; a ValueError suggests the nearest one."""
    if name not in MODELS:
        close = get_close_matches(name, MODELS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"preset: there is no model {name!r}, only {', '.join(MODELS)}{hint}")
    return MODELS[name](mixers)


def pattern(mixers: Pattern) -> tuple[str, ...]:
    """One name, names joined by "-" or "," (hawk-mesa), or a tuple, as a tuple."""
    if isinstance(mixers, str):
        return tuple(name.strip() for name in mixers.replace(",", "-").split("-"))
    return tuple(mixers)
