"""The real-gated linear recurrent unit of Griffin and RecurrentGemma."""

from __future__ import annotations

import torch
from torch import Tensor

from mesanet.ops.reference.sequences import over_sequences, stack_time

STEEPEST_ROOT = 1000.0
"""Largest slope of the square root in the backward pass, as in Griffin: at a = 1 the true one is infinite."""


def rg_lru(
    x: Tensor, log_decay: Tensor, state: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """h_t = a_t h_{t-1} + sqrt(1 - a_t^2) x_t with a = exp(log_decay), channel by channel.

    x, log_decay [B, T, D]; state [B, D] -> output [B, T, D], state. A log_decay of minus infinity makes h_t = x_t,
    which is how RecurrentGemma treats the first token of a document.
    """

    def rule(x: Tensor, decay: Tensor, scale: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden = x.new_zeros(x.shape[0], x.shape[2]) if state is None else state
        outputs = []
        for t in range(x.shape[1]):
            hidden = decay[:, t] * hidden + scale[:, t] * x[:, t]
            outputs.append(hidden)
        return stack_time(outputs, x), hidden

    scale = root_with_bounded_slope(-torch.expm1(2 * log_decay))
    return over_sequences(rule, {"x": x, "decay": torch.exp(log_decay), "scale": scale}, state, cu_seqlens)


def root_with_bounded_slope(square: Tensor) -> Tensor:
    """sqrt(square), whose derivative is replaced by STEEPEST_ROOT where it would be larger."""
    bound = (0.5 / STEEPEST_ROOT) ** 2
    steep = square.detach().sqrt() + STEEPEST_ROOT * (square - square.detach())
    return torch.where(square > bound, square.clamp(min=bound).sqrt(), steep)
