"""The small layers are the equations that docs/maths.md prints."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mesanet.config.model import ModelConfig
from mesanet.mixers import MIXERS, HeadMixer
from mesanet.mixers.attention import SlidingWindow
from mesanet.mixers.hawk import Hawk
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


def test_mlstm_caps_its_gates_and_scales_its_queries() -> None:
    """Both logits softly at 15, and the queries by K^-1/2, as in xLSTM: token by token as it is written there."""
    mixer = MIXERS["mlstm"](ModelConfig(mixers=("mlstm",), width=8, heads=1, key_size=4, layers=1), 0).double()
    assert isinstance(mixer, HeadMixer)
    assert mixer.forget_gate is not None
    assert mixer.write_gate is not None
    # Large enough for the cap to matter.
    x = 10 * torch.randn(1, 9, 8, dtype=torch.float64)
    layout = dense_layout(1, 9, None, None, x.device)
    gates = mixer.gates(x, layout)
    forget, write = (15 * torch.tanh(gate(x) / 15) for gate in (mixer.forget_gate, mixer.write_gate))
    torch.testing.assert_close(gates.log_decay, torch.log(torch.sigmoid(forget)))
    torch.testing.assert_close(gates.write, write)
    assert write.abs().max() > 5

    q, k, v = torch.randn(3, 1, 9, 1, 4, dtype=torch.float64)
    output, _ = mixer.mix(q, k, v, gates, None, layout)
    kv, normaliser, stabiliser = torch.zeros(4, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64), 0.0
    for t in range(9):
        log_forget, log_input = math.log(forget[0, t].sigmoid().item()), write[0, t].item()
        largest = max(log_forget + stabiliser, log_input)
        f, i = math.exp(log_forget + stabiliser - largest), math.exp(log_input - largest)
        key, value, query = k[0, t, 0], v[0, t, 0], q[0, t, 0] / math.sqrt(4)
        kv, normaliser, stabiliser = f * kv + i * torch.outer(key, value), f * normaliser + i * key, largest
        expected = query @ kv / (max(abs(normaliser @ query), math.exp(-stabiliser)) + 1e-6)
        torch.testing.assert_close(output[0, t, 0], expected)


def test_hawk_is_the_recurrent_block_of_recurrent_gemma() -> None:
    """Branch, convolution, gates and unit with the same weights; only theirs has biases in the outer projections.

    Float32, with relative errors below 1e-5: sums of 32 terms, each rounded by 6e-8, through five layers, where the
    unit's forget factors stay far enough from one for their root of 1 - a^2 to keep its digits.
    """
    gemma = pytest.importorskip("transformers.models.recurrent_gemma.modeling_recurrent_gemma")
    settings = pytest.importorskip("transformers").RecurrentGemmaConfig(
        hidden_size=32, lru_width=32, num_attention_heads=4
    )
    theirs = gemma.RecurrentGemmaRecurrentBlock(settings, layer_idx=0)
    ours = Hawk(ModelConfig(mixers=("hawk",), width=32, heads=4, layers=1, hawk_multiplier=1.0), 0)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=1 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5)
    outer = {"branch": theirs.linear_y, "input": theirs.linear_x, "output": theirs.linear_out}
    unit = theirs.rg_lru
    weights: dict[str, Tensor] = {f"{name}.weight": layer.weight for name, layer in outer.items()}
    weights |= {"convolution.weight": theirs.conv_1d.weight.squeeze(1), "convolution.bias": theirs.conv_1d.bias}
    weights |= {"input_gate.weight": unit.input_gate_weight, "input_gate.bias": unit.input_gate_bias.flatten()}
    weights |= {
        "forget_gate.weight": unit.recurrent_gate_weight,
        "forget_gate.bias": unit.recurrent_gate_bias.flatten(),
    }
    ours.load_state_dict({**weights, "forget_parameter": unit.recurrent_param})
    for layer in outer.values():
        torch.nn.init.zeros_(layer.bias)

    x = torch.randn(2, 40, 32, requires_grad=True)
    positions = torch.arange(40).expand(2, 40)
    expected, _ = theirs(x, positions, attention_mask=None, use_cache=False)
    actual, _ = ours(x, dense_layout(2, 40, None, None, x.device), None)
    probe = torch.randn_like(expected)
    for one, other in [
        (actual, expected),
        (torch.autograd.grad(actual, x, probe)[0], torch.autograd.grad(expected, x, probe)[0]),
    ]:
        assert (one - other).norm() <= 1e-5 * other.norm()


def test_rotary_angles_are_exact_far_into_a_text() -> None:
    layout = dense_layout(1, 1, torch.tensor([10**6]), None, torch.device("cpu"))
    cosine, sine = layout.rotary(8, 10_000.0, torch.float32)
    angles = [10**6 * 10_000.0 ** (-place / 8) for place in range(0, 8, 2)]
    assert cosine.flatten().tolist() == pytest.approx([math.cos(angle) for angle in angles], abs=1e-7)
    assert sine.flatten().tolist() == pytest.approx([math.sin(angle) for angle in angles], abs=1e-7)


@pytest.mark.parametrize("padded", [False, True])
def test_a_window_that_fills_up_piece_by_piece_gives_the_whole(padded: bool) -> None:
    """Pieces while everything fits the window, the one with which it no longer does, and pieces behind that."""
    mixer = SlidingWindow(ModelConfig(width=16, heads=2, key_size=8, layers=1, window=20), 0)
    q, k, v = torch.randn(3, 2, 90, 2, 8, dtype=torch.float64)
    padding = torch.tensor([2, 0]) if padded else None
    whole, after_whole = mixer.attend(q, k, v, padding, None)
    outputs, state = [], None
    for begin, end in [(0, 3), (3, 8), (8, 9), (9, 19), (19, 20), (20, 22), (22, 50), (50, 90)]:
        piece = (tensor[:, begin:end] for tensor in (q, k, v))
        output, state = mixer.attend(*piece, padding if begin == 0 else None, state)
        outputs.append(output)
    real = torch.arange(90) >= torch.tensor([[2], [0]]) if padded else torch.ones(2, 90, dtype=torch.bool)
    torch.testing.assert_close(torch.cat(outputs, dim=1)[real], whole[real])
    torch.testing.assert_close(state.keys, after_whole.keys, atol=0, rtol=0)


def test_unit_length_is_one_and_keeps_the_direction_and_zero() -> None:
    x = torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(unit_length(x), x / x.norm(dim=-1, keepdim=True))
    assert torch.equal(unit_length(torch.zeros(2, 3)), torch.zeros(2, 3))
