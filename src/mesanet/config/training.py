"""How a model is trained, and everything that one run is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from mesanet.config.base import ConfigError, check_fields, check_in_range, check_positive
from mesanet.config.data import DataConfig, PrepareConfig
from mesanet.config.model import ModelConfig

HALF_PRECISION = ("bfloat16", "float16")
"""Data types in which a weight is often so far from the next number that an update leaves it as it is."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a model is trained. The defaults are the paper's, but for the length and the learning rate."""

    steps: int | None = None
    """Number of updates; give either this or tokens."""
    tokens: int | None = None
    """Number of tokens to train on, from which the number of updates follows."""
    peak_learning_rate: float = 1e-3
    """Learning rate at the end of the warmup."""
    start_learning_rate: float = 1e-6
    """Learning rate of the first update; it rises linearly to the peak."""
    warmup_steps: int = 2000
    """Number of updates before the one with the peak learning rate."""
    final_fraction: float = 0.1
    """Learning rate of the last update, as a fraction of the peak; a cosine leads there."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Decay of AdamW's averages of the gradient and of its square."""
    epsilon: float = 1e-8
    """Added to AdamW's denominator."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices only: not on embeddings, norms, biases and the ridge."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this norm, taken over all of them, where it is greater."""
    accumulation: int = 1
    """Parts that a process cuts its sequences of a step into, one after the other, to save memory."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 keeps the weights in float32 and computes under autocast."""
    activation_checkpointing: bool = False
    """Compute each block's activations again on the way back instead of keeping them."""
    compile: bool = False
    """Compile each block with torch.compile."""
    validation_interval: int = 1000
    """Updates between two validations; 0 validates at the end only."""
    validation_tokens: int | None = 1 << 21
    """Validate on at most this many tokens, always the same ones; None takes the whole held-out split."""
    checkpoint_interval: int = 1000
    """Updates between two checkpoints; there is one at the end in any case."""
    keep: int = 2
    """How many of the newest checkpoints stay on the disk."""
    seed: int = 0
    """Seed of the initial weights."""
    parallel: Literal["none", "ddp", "fsdp"] = "none"
    """How several processes share the work: ddp copies the weights, fsdp shards them; torchrun starts the processes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU if there is one."""
    tensorboard: bool = False
    """Write TensorBoard events into the run folder as well."""

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.steps is None) == (self.tokens is None):
            raise ConfigError(
                "steps", f"got {self.steps!r} with tokens {self.tokens!r}, expected exactly one of the two"
            )
        for name in ("steps", "tokens", "validation_tokens"):
            if getattr(self, name) is not None:
                check_in_range(name, getattr(self, name), 1)
        for name in ("peak_learning_rate", "start_learning_rate", "epsilon", "clip_norm"):
            check_positive(name, getattr(self, name))
        for name in ("accumulation", "checkpoint_interval", "keep"):
            check_in_range(name, getattr(self, name), 1)
        for name in ("warmup_steps", "validation_interval"):
            check_in_range(name, getattr(self, name), 0)
        check_in_range("weight_decay", self.weight_decay, 0, math.inf, high_open=True)
        for index, beta in enumerate(self.betas):
            check_in_range(f"betas[{index}]", beta, 0, 1, high_open=True)
        check_in_range("final_fraction", self.final_fraction, 0, 1)
        check_in_range("seed", self.seed, 0, 2**63 - 1)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run: a model, its data, and how it is trained."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    data: DataConfig
    """The batches."""
    training: TrainingConfig
    """The optimisation."""
    prepare: PrepareConfig | None = None
    """How to prepare the data, if they are to lie in its folder and are not there yet; None leaves that to you."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.model.dtype in HALF_PRECISION:
            raise ConfigError(
                "model.dtype",
                f"got {self.model.dtype!r}, in which updates are lost to rounding, expected float32 or float64 "
                "to train; training.precision='bfloat16' computes with fewer bits",
            )
        if self.training.warmup_steps >= self.steps:
            raise ConfigError(
                "training.warmup_steps", f"got {self.training.warmup_steps}, expected fewer than the {self.steps} steps"
            )

    @property
    def steps(self) -> int:
        """Number of updates."""
        if self.training.steps is not None:
            return self.training.steps
        assert self.training.tokens is not None
        return max(1, self.training.tokens // self.tokens_per_step)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one update, over all processes together."""
        return self.data.batch_size * self.data.sequence_length


def default_out(preset: str, config: RunConfig) -> Path:
    """The run folder of a preset, where none is named."""
    return Path("runs") / f"{preset}-{'-'.join(config.model.mixers)}"


def with_length(
    config: RunConfig, *, steps: int | None, tokens: int | None, warmup_steps: int | None = None
) -> RunConfig:
    """The same run with another length, in steps or in tokens; with neither it stays as it is.

    A warmup that changes too has to be named here, as the present one may be too long for the new length.
    """
    if steps is None and tokens is None:
        return config
    warmup_steps = config.training.warmup_steps if warmup_steps is None else warmup_steps
    return replace(config, training=replace(config.training, steps=steps, tokens=tokens, warmup_steps=warmup_steps))
