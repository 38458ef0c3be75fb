"""The small layers that mixers and models share.

A module says in `undecayed` which of its own parameters weight decay leaves alone.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mesanet.mixers.layout import Layout, join_history


class Linear(nn.Linear):
    """A linear map, drawn from a normal distribution of variance gain / inputs; a bias is zero and does not decay."""

    undecayed: ClassVar[tuple[str, ...]] = ("bias",)

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, gain: float = 1.0) -> None:
        self.gain = gain
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        """Draw the weights by fan-in."""
        nn.init.normal_(self.weight, std=math.sqrt(self.gain / self.in_features))
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class RMSNorm(nn.Module):
    """Scale the last dimension to a root mean square of one, then by learned weights of the given shape."""

    undecayed: ClassVar[tuple[str, ...]] = ("weight",)

    def __init__(self, *shape: int, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(*shape))

    def reset_parameters(self) -> None:
        """Start at one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise in float32 or wider; the result has the dtype of x."""
        wide = x if x.dtype == torch.float64 else x.float()
        return (F.rms_norm(wide, x.shape[-1:], eps=self.epsilon) * self.weight).to(x.dtype)


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over time: y_t = sum_i weight_i x_(t-i), each sequence by itself."""

    undecayed: ClassVar[tuple[str, ...]] = ("bias",)

    def __init__(self, channels: int, width: int, *, bias: bool = False) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights by fan-in."""
        nn.init.normal_(self.weight, std=math.sqrt(1 / self.width))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, layout: Layout, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """[B, T, D], anything at padding -> the same shape, and the last inputs of each row [rows, width - 1, D]."""
        if layout.cu_seqlens is not None:
            return self._packed(x, layout, state)
        if state is None:
            state = x.new_zeros(x.shape[0], self.width - 1, x.shape[2])
        joined = join_history(state, x, layout.padding)
        # Cloned: a view would keep the whole prompt in memory for as long as the state lives.
        return self._convolve(joined), joined[:, joined.shape[1] - self.width + 1 :].clone()

    def _convolve(self, joined: Tensor) -> Tensor:
        """[B, width - 1 + T, D] -> [B, T, D]."""
        if joined.shape[1] < self.width:
            return joined[:, :0]
        if joined.shape[1] == self.width:
            output = torch.einsum("btd,dt->bd", joined, self.weight.to(joined.dtype))[:, None]
            return output if self.bias is None else output + self.bias.to(output.dtype)
        # As a two-dimensional convolution in channels-last order, which is how x lies in memory already.
        image = joined.unsqueeze(1).permute(0, 3, 1, 2)
        bias = None if self.bias is None else self.bias.to(joined.dtype)
        output = F.conv2d(image, self.weight.to(joined.dtype)[:, None, None], bias, groups=joined.shape[2])
        return output.squeeze(2).transpose(1, 2)

    def _packed(self, x: Tensor, layout: Layout, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Every sequence gets its own history in front of it; one convolution over all of them."""
        assert layout.cu_seqlens is not None
        history = self.width - 1
        begins, ends = layout.cu_seqlens[:-1], layout.cu_seqlens[1:]
        sequences = begins.shape[0]
        row = torch.repeat_interleave(ends - begins, output_size=x.shape[1])
        place = torch.arange(x.shape[1], device=x.device) + history * (row + 1)
        steps = torch.arange(history, device=x.device)
        before = (begins + history * torch.arange(sequences, device=x.device))[:, None] + steps
        extended = x.new_zeros(x.shape[1] + history * sequences, x.shape[2])
        if state is not None:
            extended = extended.index_put((before,), state.to(x.dtype))
        extended = extended.index_copy(0, place, x[0])
        last = (ends + history * torch.arange(sequences, device=x.device))[:, None] + steps
        if x.shape[1] == 0:
            return x, extended[last]
        return self._convolve(extended[None])[:, place - history], extended[last]


def apply_rotary(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the two halves of the last dimension of [B, T, H, K] by the angles [B, T, 1, K / 2]."""
    first, second = x.to(cosine.dtype).chunk(2, dim=-1)
    rotated = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    return rotated.to(x.dtype)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[..., H * R] -> [..., H, R]."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def unit_length(x: Tensor) -> Tensor:
    """Scale the last dimension to length one; zero stays zero."""
    wide = x if x.dtype == torch.float64 else x.float()
    # The square of a normal float32 activation is far above this: it only keeps zero from dividing by zero.
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-12)).to(x.dtype)
