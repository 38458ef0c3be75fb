"""The Mesa rule on inputs at the edge: no NaN, no infinity, nothing raised."""

from __future__ import annotations

import pytest
import torch
from tests.ops.mesa_cases import Inputs, equal_tokens, from_nothing, gradients, make_inputs, relative_error

from mesanet.ops import reference
from mesanet.ops.mesa import mesa


def _forget_everything(inputs: Inputs) -> Inputs:
    log_decay = inputs.log_decay.clone()
    for token in (0, 5, 64, 90, 91, 92):
        log_decay[:, token : token + 1] = -torch.inf
    return inputs._replace(log_decay=log_decay)


EXTREMES = {
    "forget everything": _forget_everything,
    "write nothing": lambda inputs: inputs._replace(write=torch.zeros_like(inputs.write)),
    "zero keys": lambda inputs: inputs._replace(k=torch.zeros_like(inputs.k)),
    "zero queries": lambda inputs: inputs._replace(q=torch.zeros_like(inputs.q)),
    "huge keys": lambda inputs: inputs._replace(k=inputs.k * 1e4),
    "huge keys, nothing forgotten": lambda inputs: inputs._replace(
        k=inputs.k * 1e4, log_decay=torch.zeros_like(inputs.log_decay)
    ),
    "tiny keys": lambda inputs: inputs._replace(k=inputs.k * 1e-4),
    "float16": lambda inputs: Inputs(*(t.half() for t in inputs[:6]), *inputs[6:]),
    "bfloat16": lambda inputs: Inputs(*(t.bfloat16() for t in inputs[:6]), *inputs[6:]),
    "not contiguous": lambda inputs: Inputs(
        *(torch.stack([t, t], dim=-1).flatten(-2)[..., ::2] for t in inputs[:6]), *inputs[6:]
    ),
    "no tokens": lambda inputs: Inputs(*(t[:, :0] for t in inputs.sequences), *inputs[5:]),
    "no sequences": lambda inputs: Inputs(
        *(t[:0] for t in inputs.sequences), inputs.ridge, inputs.kk[:0], inputs.kv[:0]
    ),
}


def _check(inputs: Inputs) -> None:
    """Output, state and all gradients are finite, of the right dtype and shape."""
    inputs = Inputs(*(tensor.detach().requires_grad_() for tensor in inputs))
    got = mesa(*inputs[:6], inputs.state)
    assert got.output.dtype == inputs.v.dtype
    assert got.state.kk.dtype == torch.float32
    found = gradients(inputs, got.output.float(), got.state, torch.ones_like(got.output).float())
    for tensor in (got.output, *got.state, *found):
        assert bool(tensor.isfinite().all())
    for tensor, gradient in zip(inputs, found, strict=True):
        assert gradient.dtype == tensor.dtype
        assert gradient.shape == tensor.shape


@pytest.mark.parametrize("time", [1, 150])
@pytest.mark.parametrize("name", EXTREMES)
def test_extremes_stay_finite(name: str, time: int) -> None:
    _check(EXTREMES[name](make_inputs(2, time, 2, 16, 12).to(torch.float32)))


@pytest.mark.parametrize("name", EXTREMES)
def test_extremes_stay_finite_in_decoding(name: str) -> None:
    """Without gradients a single token takes a path of its own."""
    inputs = EXTREMES[name](make_inputs(2, 1, 2, 16, 12).to(torch.float32))
    with torch.no_grad():
        got = mesa(*inputs[:6], inputs.state)
    assert got.output.dtype == inputs.v.dtype
    assert got.output.shape == inputs.v.shape
    assert got.state.kk.shape == inputs.kk.shape
    for tensor in (got.output, *got.state):
        assert bool(tensor.isfinite().all())


@pytest.mark.parametrize("time", [1, 150])
def test_where_numbers_lie_in_memory_does_not_matter(time: int) -> None:
    """Heads before time, as attention wants them, every second number, and one row expanded: the same to the bit."""
    inputs = make_inputs(2, time, 2, 16, 12).to(torch.float32)
    inputs = inputs._replace(k=inputs.k[:1].expand(2, -1, -1, -1), write=inputs.write[:, :, :1].expand(-1, -1, 2))
    elsewhere = EXTREMES["not contiguous"](inputs)
    heads_first = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in inputs.sequences]
    results = []
    for variant in (Inputs(*(t.contiguous() for t in inputs)), inputs, elsewhere, Inputs(*heads_first, *inputs[5:])):
        variant = Inputs(*(tensor.detach().requires_grad_() for tensor in variant))
        results.append((variant, mesa(*variant[:6], variant.state)))
    assert not any(tensor.is_contiguous() for tensor in results[2][0][:6])
    first = gradients(results[0][0], results[0][1].output, results[0][1].state, torch.ones_like(inputs.v))
    for variant, got in results[1:]:
        assert torch.equal(got.output, results[0][1].output)
        found = gradients(variant, got.output, got.state, torch.ones_like(inputs.v))
        assert all(torch.equal(one, other) for one, other in zip(found, first, strict=True))


@pytest.mark.parametrize("scale", [1.0, 1e2, 1e3, 1e4])
@pytest.mark.parametrize("key", [32, 64, 128])
def test_screaming_stays_finite(key: int, scale: float) -> None:
    """Thousands of equal tokens, none forgotten: a matrix of rank one beside which the ridge is a rounding error."""
    _check(from_nothing(equal_tokens(make_inputs(1, 2048, 1, key, 4).to(torch.float32), scale)))


def test_screaming_for_long_with_hardly_a_ridge_stays_finite() -> None:
    inputs = from_nothing(equal_tokens(make_inputs(1, 8192, 1, 64, 4).to(torch.float32)))
    _check(inputs._replace(ridge=torch.full_like(inputs.ridge, 1e-3)))


@pytest.mark.parametrize("scale", [1e2, 1e3, 1e4, 1e6])
def test_decoding_survives_a_singular_matrix(scale: float) -> None:
    """A key beside whose square the ridge is lost in float32: the matrix as it can be written down has rank one."""
    inputs = from_nothing(make_inputs(1, 1, 1, 16, 4).to(torch.float32))
    inputs = inputs._replace(
        k=torch.full_like(inputs.k, scale / 4),
        ridge=torch.full_like(inputs.ridge, 0.25),
        log_decay=torch.zeros_like(inputs.log_decay),
        write=torch.ones_like(inputs.write),
    )
    with torch.no_grad():
        got = mesa(*inputs[:6], inputs.state)
    exact = inputs.to(torch.float64)
    error = (got.output.double() - reference.mesa(*exact[:6])[0]).norm()
    # Both the tolerance and rounding leave a residual r, which changes k . x by at most |r| / |k|: the read-out by |v|
    # times that. Rounding x itself, of length at most |q| / ridge = 4, changes it by 2^-24 |k| |x|; four roundings as
    # the residual is formed from its products.
    assert float(error) < float(inputs.v.norm()) * (1e-4 / scale + 4 * 2**-24 * 4 * scale)
    assert int(got.steps) <= 30


def test_extreme_heads_leave_their_neighbours_alone() -> None:
    """A head whose matrix is singular in float32 beside an ordinary one, token by token and in parallel."""
    inputs = from_nothing(make_inputs(1, 130, 2, 16, 4).to(torch.float32))
    ordinary = reference.mesa(*inputs.to(torch.float64)[:6])[0][:, :, 0]
    inputs.k[:, :, 1] = 2.5e3
    for time in (1, 130):
        pieces = [tensor[:, :time] for tensor in inputs.sequences]
        with torch.no_grad():
            got = mesa(*pieces, inputs.ridge)
        # The default tolerance, times a condition number of some tens.
        assert relative_error(got.output[:, :, 0], ordinary[:, :time]) < 1e-2
        assert bool(got.output.isfinite().all())


@pytest.mark.parametrize("time", [1, 64, 70])
def test_a_query_that_is_no_number_did_not_converge(time: int) -> None:
    inputs = make_inputs(2, time, 2, 6, 4)
    expected = mesa(*inputs[:6], inputs.state)
    q = inputs.q.clone()
    q[1, -1, 0] = torch.nan
    got = mesa(q, *inputs[1:6], inputs.state)
    assert int(got.steps[1, -1, 0]) == 30
    sound = torch.ones(2, time, 2, dtype=torch.bool)
    sound[1, -1, 0] = False
    # A factorisation that one token misses is not what the others end with: they are as good, but not bit-equal.
    torch.testing.assert_close(got.output[sound], expected.output[sound], rtol=1e-3, atol=1e-3)
    assert bool((got.steps[sound] < 30).all())


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("time", [1, 64, 70])
def test_the_output_can_be_changed_in_place(batch: int, time: int) -> None:
    inputs = make_inputs(batch, time, 2, 6, 4).with_grad()
    output = mesa(*inputs[:6], inputs.state).output
    output.mul_(2).sum().backward()
    (expected,) = torch.autograd.grad(2 * mesa(*inputs[:6], inputs.state).output.sum(), inputs.v)
    torch.testing.assert_close(inputs.v.grad, expected)
