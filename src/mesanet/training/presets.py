"""Named training runs: functions from a pattern of mixers to a run config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from mesanet import presets as models
from mesanet.config.data import DataConfig, PrepareConfig
from mesanet.config.model import ModelConfig
from mesanet.config.training import RunConfig, TrainingConfig
from mesanet.errors import UserError
from mesanet.presets import Pattern
from mesanet.presets import pattern as pattern

COLUMNS = ("attention", "mamba2", "gla", "mlstm", "deltanet", "gated_deltanet", "hawk", "hawk-mesa", "mesa")
TUNED = {
    ("small", 15): (0.0025, 0.003, 0.002, 0.0025, 0.003, 0.001, 0.002, 0.0025, 0.003),
    ("small", 50): (0.003, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001, 0.00095),
    ("medium", 15): (0.0015, 0.0025, 0.0025, 0.003, 0.003, 0.0025, 0.0025, 0.002, 0.0025),
    ("medium", 50): (0.001, 0.001, 0.00095, 0.0009, 0.00085, 0.00095, 0.0009, 0.0009, 0.001),
    ("large", 15): (0.002, 0.002, 0.002, 0.0015, 0.0015, 0.002, 0.002, 0.002, 0.002),
    ("large", 50): (0.0008, 0.0009, 0.00085, 0.0008, 0.0008, 0.0009, 0.0009, 0.00085, 0.00085),
}
"""The paper's peak learning rates, by size and billions of tokens, in the order of COLUMNS."""
UNTUNED = 0.001
"""For sliding_window, as the paper trained it, and for mixers that it did not train."""
GRIDS = {
    15: (0.003, 0.0025, 0.002, 0.001, 0.0015),
    # The paper prints 0.0085 for the fourth, but its table of chosen rates has 0.00085.
    50: (0.001, 0.00095, 0.0009, 0.00085, 0.0008),
}
"""The learning rates that the paper scanned, by billions of tokens."""
STDLIB = Path("runs/data/python-stdlib-bytes")
STDLIB_BPE = Path("runs/data/python-stdlib-bpe1024")


def paper(size: str, billions: int, mixers: Pattern = "mesa") -> RunConfig:
    """One of the paper's language models: batches of 256 sequences of 2048 tokens, bfloat16 activations."""
    return RunConfig(
        model=models.model(size, mixers),
        data=DataConfig(path=Path("runs/slimpajama"), sequence_length=2048, batch_size=256),
        training=TrainingConfig(
            tokens=billions * 10**9,
            peak_learning_rate=tuned_rate(size, billions, mixers),
            precision="bfloat16",
        ),
    )


def tuned_rate(size: str, billions: int, mixers: Pattern) -> float:
    """The paper's peak learning rate for this model."""
    name = "-".join(pattern(mixers))
    return dict(zip(COLUMNS, TUNED[size, billions], strict=True)).get(name, UNTUNED)


def demo(mixers: Pattern = "mesa") -> RunConfig:
    """A small model on the running Python's standard library: a minute or two on two cores."""
    return RunConfig(
        model=ModelConfig(
            mixers=pattern(mixers), layers=4, width=128, heads=2, key_size=64, vocabulary=1024, window=128
        ),
        data=DataConfig(path=STDLIB_BPE, sequence_length=512, batch_size=4),
        training=TrainingConfig(
            steps=250,
            warmup_steps=25,
            peak_learning_rate=4e-3,
            validation_interval=50,
            validation_tokens=1 << 13,
            checkpoint_interval=50,
            keep=1,
        ),
        prepare=PrepareConfig(
            sources=("python-stdlib",), out=STDLIB_BPE, tokenizer="bpe:1024", validation_fraction=0.05
        ),
    )


def laptop(mixers: Pattern = "mesa") -> RunConfig:
    """A model of six layers on the same text: a night, or a day on two cores."""
    return RunConfig(
        model=ModelConfig(
            mixers=pattern(mixers), layers=6, width=256, heads=4, key_size=64, vocabulary=257, window=256
        ),
        data=DataConfig(path=STDLIB, sequence_length=1024, batch_size=16),
        training=TrainingConfig(
            steps=10_000,
            warmup_steps=500,
            peak_learning_rate=2e-3,
            validation_interval=500,
            validation_tokens=1 << 18,
            checkpoint_interval=250,
        ),
        prepare=stdlib_bytes(),
    )


def stdlib_bytes() -> PrepareConfig:
    """The corpus that needs no download, as bytes."""
    return PrepareConfig(sources=("python-stdlib",), out=STDLIB, tokenizer="bytes", validation_fraction=0.05)


def _paper(size: str, billions: int) -> Callable[[Pattern], RunConfig]:
    return lambda mixers: paper(size, billions, mixers)


RUNS: dict[str, Callable[[Pattern], RunConfig]] = {
    "demo": demo,
    "laptop": laptop,
    **{f"{size}-{billions}b": _paper(size, billions) for size, billions in TUNED},
}
"""Every preset by name."""


def run_preset(name: str, mixers: Pattern = "mesa") -> RunConfig:
    """The training preset of this name; a ValueError suggests the nearest one."""
    if name not in RUNS:
        close = get_close_matches(name, RUNS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UserError(f"preset: there is no run {name!r}, only {', '.join(RUNS)}{hint}")
    config = RUNS[name](mixers)
    return replace(config, model=replace(config.model, mixers=known_mixers(config.model.mixers)))


def known_mixers(names: tuple[str, ...]) -> tuple[str, ...]:
    """The same names, or a ValueError for one that no mixer has."""
    from mesanet.mixers import mixer_class

    for name in names:
        mixer_class(name)
    return names


def mixer_patterns(names: Sequence[str]) -> tuple[str, ...]:
    """One name for each model, however it is written: commas separate models, and "-" the mixers of one pattern."""
    words = [word.strip() for name in names for word in name.split(",")]
    found = tuple(dict.fromkeys("-".join(known_mixers(pattern(word))) for word in words if word))
    if not found:
        raise UserError("mixers: got none, expected at least one name, such as mesa")
    return found
