"""The residual block is the equations that docs/maths.md prints."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mesanet.config.model import ModelConfig
from mesanet.mixers.layout import dense_layout
from mesanet.model.backbone import Block
from mesanet.model.layers import SwiGLU


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return weight * x / (x.square().mean(dim=-1, keepdim=True) + epsilon).sqrt()


def swiglu(x: Tensor, layer: SwiGLU) -> Tensor:
    """W_down (silu(W_gate x) * W_up x), with silu(y) = y / (1 + exp(-y))."""
    gate, up = x @ layer.gate.weight.T, x @ layer.up.weight.T
    return (gate / (1 + torch.exp(-gate)) * up) @ layer.down.weight.T


def test_the_mlp_is_its_equation() -> None:
    layer = SwiGLU(8, 24, output_gain=0.5).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(layer(x), swiglu(x, layer))
    assert layer.gate.bias is layer.up.bias is layer.down.bias is None


@pytest.mark.parametrize("mixer", ["attention", "gla", "hawk"])
def test_the_block_is_its_equation(mixer: str) -> None:
    """x + mixer(norm(x)), then x + mlp(norm(x)): each norm has its own weight, and the stream itself none."""
    config = ModelConfig(mixers=(mixer,), layers=1, width=16, heads=2, key_size=8, norm_epsilon=1e-2)
    block = Block(config, 0).double()
    for norm in (block.mixer_norm, block.mlp_norm):
        torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    layout = dense_layout(2, 7, None, None, x.device)
    output, _ = block(x, layout, None)
    middle = x + block.mixer(rms_norm(x, block.mixer_norm.weight, 1e-2), layout, None)[0]
    torch.testing.assert_close(output, middle + swiglu(rms_norm(middle, block.mlp_norm.weight, 1e-2), block.mlp))
