"""The small layers are the equations that docs/maths.md prints."""

from __future__ import annotations

import torch

from mesanet.config.model import ModelConfig
from mesanet.mixers import MIXERS, HeadMixer
from mesanet.mixers.layers import RMSNorm, ShortConvolution, unit_length
from mesanet.mixers.layout import dense_layout


def test_rms_norm_is_its_equation() -> None:
    norm = RMSNorm(3, 5, epsilon=1e-3).double()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 7, 3, 5, dtype=torch.float64)
    expected = norm.weight * x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(norm(x), expected)


def test_the_convolution_is_its_equation() -> None:
    convolution = ShortConvolution(6, 4, bias=True).double()
    torch.nn.init.normal_(convolution.bias)
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    output, state = convolution(x, dense_layout(2, 9, None, None, x.device), None)
    for t in range(9):
        # The last weight is that of the token itself.
        expected = sum(convolution.weight[:, 3 - i] * x[:, t - i] for i in range(4) if i <= t) + convolution.bias
        torch.testing.assert_close(output[:, t], expected)
    assert torch.equal(state, x[:, -3:])


def test_gates_are_one_sigmoid_for_each_head() -> None:
    mixer = MIXERS["gla"](ModelConfig(mixers=("gla",), width=8, heads=2, key_size=4, layers=1), 0).double()
    assert isinstance(mixer, HeadMixer)
    x = 3 * torch.randn(2, 5, 8, dtype=torch.float64)
    gates = mixer.gates(x, dense_layout(2, 5, None, None, x.device))
    assert gates.log_decay is not None
    assert mixer.forget_gate is not None
    assert mixer.write_gate is not None
    torch.testing.assert_close(gates.log_decay.exp(), mixer.forget_gate(x).sigmoid())
    torch.testing.assert_close(gates.write, mixer.write_gate(x).sigmoid())


def test_unit_length_is_one_and_keeps_the_direction_and_zero() -> None:
    x = torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(unit_length(x), x / x.norm(dim=-1, keepdim=True))
    assert torch.equal(unit_length(torch.zeros(2, 3)), torch.zeros(2, 3))
