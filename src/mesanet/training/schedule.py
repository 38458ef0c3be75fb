"""The learning rate of every update."""

from __future__ import annotations

import math

from mesanet.config.training import TrainingConfig


def learning_rate(config: TrainingConfig, steps: int, step: int) -> float:
    """Learning rate of update `step` of `steps`, counted from 0: a linear warmup, then a cosine.

    The first update has the start value, the one after `warmup_steps` updates the peak, the last one the final value.
    """
    peak, warmup, last = config.peak_learning_rate, config.warmup_steps, steps - 1
    if step < warmup:
        return config.start_learning_rate + (peak - config.start_learning_rate) * (step / warmup)
    done = (step - warmup) / (last - warmup) if last > warmup else 0.0
    final = config.final_fraction * peak
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return peak * cosine + final * (1 - cosine)
