"""What the backbone has around the mixers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mesanet.mixers.layers import Linear


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden: int, *, output_gain: float) -> None:
        super().__init__()
        self.gate = Linear(width, hidden)
        self.up = Linear(width, hidden)
        self.down = Linear(hidden, width, gain=output_gain)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token by itself."""
        output: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return output


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap), in float32 or wider."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.tanh(wide / cap) * cap
