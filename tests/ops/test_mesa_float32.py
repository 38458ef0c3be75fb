"""The Mesa rule in float32 and less: how far its outputs and gradients are from the exact ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ops.mesa_cases import EXACT, Inputs, equal_tokens, from_nothing, make_inputs, relative_error, token_by_token

from mesanet.ops import reference
from mesanet.ops.mesa import mesa
from mesanet.ops.precision import own_precision
from mesanet.ops.solver import ConjugateGradient

FINE = ConjugateGradient(max_steps=200, tolerance=1e-6)
ORDINARY = {"gamma": (0.8, 1.0), "ridge": (0.25, 1.0)}
STIFF = {"gamma": (1.0, 1.0), "ridge": (0.25, 0.25), "correlated": True}


@pytest.mark.parametrize(
    ("time", "key", "kind", "output_bound", "gradient_bound"),
    [
        (1000, 64, ORDINARY, 1e-5, 1e-4),
        (4096, 64, STIFF, 1e-3, 1e-2),
        pytest.param(4096, 128, STIFF, 1e-3, 1e-2, marks=pytest.mark.slow),
    ],
)
def test_accuracy(time: int, key: int, kind: dict[str, Any], output_bound: float, gradient_bound: float) -> None:
    """Output and gradients, whatever the scale of the incoming gradient: a mean loss gives 1e-4 and less."""
    exact = from_nothing(make_inputs(1, time, 1, key, 48, **kind))
    grad_output = torch.randn(1, time, 1, 48, dtype=torch.float64)
    inputs = exact.to(torch.float32).with_grad()
    got = mesa(*inputs[:6], inputs.state, solver=FINE)
    assert relative_error(got.output, reference.mesa(*exact[:6], exact.state)[0]) < output_bound
    # The exact gradients by the parallel form in float64, which `test_mesa.py` holds against the reference: a graph
    # through thousands of factorisations would not fit.
    exact = exact.with_grad()
    exact_output = mesa(*exact[:6], exact.state, solver=EXACT).output
    exact_gradients = torch.autograd.grad((exact_output * grad_output).sum(), exact)
    for scale in (1.0, 1e-4, 1e-8):
        loss = (got.output * (scale * grad_output).float()).sum()
        scaled_gradients = torch.autograd.grad(loss, inputs, retain_graph=True)
        for name, ours, theirs in zip(Inputs._fields, scaled_gradients, exact_gradients, strict=True):
            assert relative_error(ours.double() / scale, theirs) < gradient_bound, (name, scale)


@pytest.mark.parametrize("kind", [ORDINARY, STIFF])
def test_decoding_is_as_accurate_as_the_whole(kind: dict[str, Any]) -> None:
    exact = from_nothing(make_inputs(1, 200, 2, 48, 16, **kind))
    expected, after = reference.mesa(*exact[:6], exact.state)
    with torch.no_grad():
        single = token_by_token(exact.to(torch.float32), solver=FINE)
    assert relative_error(single.output, expected) < 1e-5
    assert relative_error(single.state.kk, after.kk) < 1e-5
    assert relative_error(single.state.kv, after.kv) < 1e-5


@pytest.mark.parametrize("scale", [1e-8, 1e-30, 1e8])
def test_scaling_the_query_scales_the_answer_and_nothing_else(scale: float) -> None:
    inputs = make_inputs(1, 200, 2, 16, 4).to(torch.float32)
    # A power of two, so that scaling rounds nothing.
    factor = 2.0 ** round(torch.tensor(scale).log2().item())
    plain = mesa(*inputs[:6], inputs.state)
    scaled = mesa(inputs.q * factor, *inputs[1:6], inputs.state)
    assert torch.equal(plain.output * factor, scaled.output)
    assert torch.equal(plain.steps, scaled.steps)


def test_screaming() -> None:
    """Thousands of equal tokens, none of them forgotten, make H a huge matrix of rank one."""
    inputs = from_nothing(equal_tokens(make_inputs(1, 8192, 1, 32, 8).to(torch.float32)))
    got = mesa(*inputs[:6], inputs.state)
    # With k = k_1 always, H = t k k^T and G = t v k^T, so the answer is in closed form (Sherman-Morrison).
    exact = inputs.to(torch.float64)
    count = torch.arange(1, 8193, dtype=torch.float64)[None, :, None, None]
    k_q, k_k = ((exact.k * other / exact.ridge).sum(-1, keepdim=True) for other in (exact.q, exact.k))
    along = count * k_q / (1 + count * k_k)
    closed_form = along * exact.v
    wide = mesa(*exact[:6], exact.state, solver=EXACT).output
    assert relative_error(wide, closed_form) < 1e-9
    # The read-out is t v (k . x), in which a rounding of x, relative 2^-24, becomes t |v| |x| 2^-24. Four things are
    # rounded, each with an effect of that size: H, G, x, and the product by which x is judged.
    x = (exact.q - along * exact.k) / exact.ridge
    rounding = 2**-24 * float((count * x.norm(dim=-1, keepdim=True) * exact.v).norm() / closed_form.norm())
    assert relative_error(got.output, closed_form) < 4 * rounding
    assert 4 * rounding < 0.1


def test_half_precision_loses_only_the_rounding_of_the_inputs() -> None:
    inputs = make_inputs(1, 300, 2, 32, 16).to(torch.float32)
    rounded = Inputs(*(tensor.bfloat16() for tensor in inputs[:6]), *inputs[6:])
    got = mesa(*rounded[:6], rounded.state).output
    expected = mesa(*(tensor.float() for tensor in rounded[:6]), rounded.state).output
    # The output is rounded once, to 8 bits.
    torch.testing.assert_close(got.float(), expected, rtol=2**-8, atol=0.0)


@pytest.mark.parametrize("time", [1, 100])
def test_autocast_does_not_reach_inside(time: int) -> None:
    inputs = make_inputs(2, time, 3, 32, 8).to(torch.float32).with_grad()
    grad_output = torch.randn(2, time, 3, 8)
    plain = mesa(*inputs[:6], inputs.state)
    expected = torch.autograd.grad(plain.output, inputs, grad_output)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = mesa(*inputs[:6], inputs.state)
        found = torch.autograd.grad(cast.output, inputs, grad_output)
        with torch.no_grad():
            without_graph = mesa(*inputs[:6], inputs.state)
    with torch.no_grad():
        plain_without_graph = mesa(*inputs[:6], inputs.state)
    pairs = zip(
        (cast.output, *cast.state, cast.steps, *found, without_graph.output, *without_graph.state),
        (plain.output, *plain.state, plain.steps, *expected, plain_without_graph.output, *plain_without_graph.state),
        strict=True,
    )
    assert all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs)


def _by_backend(value: str) -> None:
    torch.backends.cuda.matmul.fp32_precision = value


def _old_switch(value: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = value


SWITCHES: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
    "high": (
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: torch.set_float32_matmul_precision("highest"),
    ),
    "medium": (
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: torch.set_float32_matmul_precision("highest"),
    ),
    "allow_tf32": (lambda: _old_switch(True), lambda: _old_switch(False)),
    "by backend": (lambda: _by_backend("tf32"), lambda: _by_backend("none")),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_the_callers_choice_of_matrix_products_stays_outside(name: str) -> None:
    """Inside, products of float32 matrices are float32; afterwards the choice is what it was."""
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("needs the settings of PyTorch 2.9")

    def settings() -> list[str]:
        return [torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision]

    turn_on, turn_off = SWITCHES[name]
    try:
        turn_on()
        before = settings()
        assert "tf32" in before
        with own_precision(torch.device("cpu")):
            with own_precision(torch.device("cpu")):
                assert all(setting in ("ieee", "none") for setting in settings())
            assert all(setting in ("ieee", "none") for setting in settings())
        assert settings() == before
    finally:
        turn_off()
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="TensorFloat-32 needs a GPU")
def test_tensor_float_32_does_not_reach_inside() -> None:
    inputs = make_inputs(1, 300, 2, 64, 16, **STIFF).to(torch.float32)
    inputs = Inputs(*(tensor.cuda() for tensor in inputs)).with_grad()
    grad_output = torch.randn(1, 300, 2, 16, device="cuda")
    results = []
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            output = mesa(*inputs[:6], inputs.state).output
            results.append([output, *torch.autograd.grad(output, inputs, grad_output)])
    finally:
        torch.set_float32_matmul_precision(before)
    for ours, theirs in zip(*results, strict=True):
        # Not bit by bit: some sums on a GPU have no fixed order.
        assert relative_error(ours, theirs) < 1e-5
