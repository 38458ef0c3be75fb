"""Hawk: Griffin's recurrent block around the real-gated linear recurrent unit."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mesanet.config.model import ModelConfig
from mesanet.mixers.base import Mixer, wide, without_autocast
from mesanet.mixers.layers import Linear, ShortConvolution, split_heads
from mesanet.mixers.layout import Layout
from mesanet.ops.rg_lru import rg_lru

SHARPNESS = 8.0
"""Griffin's c: log a_t = -c * gate * softplus(parameter)."""
SLOWEST, FASTEST = 0.999, 0.9
"""Range of the forget factor at the start, for an open gate."""


class BlockLinear(nn.Module):
    """A block-diagonal linear map with bias: [..., H * R] -> the same shape, each block by itself."""

    undecayed: ClassVar[tuple[str, ...]] = ("bias",)

    def __init__(self, blocks: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(blocks, size, size))
        self.bias = nn.Parameter(torch.empty(blocks * size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights by fan-in; the bias starts at zero."""
        nn.init.normal_(self.weight, std=math.sqrt(1 / self.weight.shape[1]))
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply each block."""
        blocks = split_heads(x, self.weight.shape[0])
        return torch.einsum("...hr,hrs->...hs", blocks, self.weight.to(x.dtype)).flatten(-2) + self.bias


class Hawk(Mixer):
    """A gated branch beside convolution and RG-LRU, whose state is a vector."""

    undecayed = ("forget_parameter",)
    eager = ("unit",)

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        size = hawk_state_size(config)
        self.branch = Linear(config.width, size)
        self.input = Linear(config.width, size)
        self.convolution = ShortConvolution(size, config.convolution_width, bias=True)
        self.input_gate = BlockLinear(config.heads, size // config.heads)
        self.forget_gate = BlockLinear(config.heads, size // config.heads)
        self.forget_parameter = nn.Parameter(torch.empty(size))
        self.output = Linear(size, config.width, gain=2 / config.layers)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Spread the forget factors of an open gate evenly over Griffin's range."""
        with torch.no_grad():
            factor = torch.empty_like(self.forget_parameter).uniform_(FASTEST, SLOWEST)
            excess = -factor.log() / SHARPNESS
            self.forget_parameter.copy_(torch.log(torch.expm1(excess)))

    def forward(self, x: Tensor, layout: Layout, state: Any) -> tuple[Tensor, Any]:
        """Convolve, gate, run the unit, and multiply with the gated branch."""
        convolved, before = (None, None) if state is None else state
        u, convolved = self.convolution(self.input(x), layout, convolved)
        forget = torch.sigmoid(wide(self.forget_gate(u)))
        log_decay = -SHARPNESS * forget * F.softplus(wide(self.forget_parameter))
        # The first token is taken whole, as Griffin does; padding leaves the state alone.
        log_decay = log_decay.masked_fill((layout.positions == 0).unsqueeze(-1), -math.inf)
        gated = wide(u) * torch.sigmoid(wide(self.input_gate(u)))
        hidden, after = self.unit(gated, log_decay, before, layout)
        mixed: Tensor = self.output(hidden.to(x.dtype) * F.gelu(self.branch(x), approximate="tanh"))
        return mixed, (convolved, after)

    def unit(self, gated: Tensor, log_decay: Tensor, state: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor]:
        """The real-gated linear recurrent unit: [B, T, R] twice and a state -> [B, T, R] and the state after it."""
        with without_autocast(gated):
            return rg_lru(
                layout.blank(gated),
                layout.blank(log_decay),
                state=state,
                cu_seqlens=layout.cu_seqlens,
                backend=self.backend,
            )


def hawk_state_size(config: ModelConfig) -> int:
    """Size of the state: as configured, or the one that gives as many parameters as attention has.

    Rounded to a multiple of 8 for each head's block where the size allows it.
    """
    heads, width = config.heads, config.width
    if config.hawk_multiplier is not None:
        size = config.hawk_multiplier * width
    else:
        # Solves 2/H R^2 + (3 D + w + 4) R = parameters of attention, in the convolution width w.
        target = 2 * width * heads * (config.key_size + config.head_value_size)
        square, linear = 2 / heads, 3 * width + config.convolution_width + 4
        size = (math.sqrt(linear**2 + 4 * square * target) - linear) / (2 * square)
    block = 8 * heads if size >= 64 * heads else heads
    return max(1, round(size / block)) * block
