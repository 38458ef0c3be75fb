"""The Mesa rule in float32: accuracy, solver steps, extreme inputs, and complaints about wrong ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.ops.mesa_cases import EXACT, Inputs, gradients, make_inputs, relative_error
from torch import Tensor

from mesanet.ops.chunks import chunk_layout
from mesanet.ops.mesa import mesa
from mesanet.ops.mesa_tiles import MesaChunks
from mesanet.ops.solver import ConjugateGradient, solve
from mesanet.ops.state import MesaState

FINE = ConjugateGradient(max_steps=200, tolerance=1e-6)
ORDINARY = {"gamma": (0.8, 1.0), "ridge": (0.25, 1.0)}
STIFF = {"gamma": (1.0, 1.0), "ridge": (0.25, 0.25), "correlated": True}


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-8])
@pytest.mark.parametrize(
    ("time", "kind", "output_bound", "gradient_bound"), [(1000, ORDINARY, 1e-5, 1e-4), (4096, STIFF, 1e-3, 1e-2)]
)
def test_accuracy(time: int, kind: dict[str, Any], output_bound: float, gradient_bound: float, scale: float) -> None:
    """Output and gradients, whatever the scale of the incoming gradient: a mean loss gives 1e-4 and less."""
    exact_inputs = make_inputs(1, time, 1, 64, 48, **kind)._replace(
        kk=torch.zeros(1, 1, 64, 64, dtype=torch.float64), kv=torch.zeros(1, 1, 64, 48, dtype=torch.float64)
    )
    grad_output = torch.randn(1, time, 1, 48, dtype=torch.float64)
    exact_inputs, inputs = exact_inputs.with_grad(), exact_inputs.to(torch.float32).with_grad()
    expected = mesa(*exact_inputs[:6], exact_inputs.state, solver=EXACT)
    got = mesa(*inputs[:6], inputs.state, solver=FINE)
    assert relative_error(got.output, expected.output) < output_bound
    exact_gradients = torch.autograd.grad((expected.output * grad_output).sum(), exact_inputs)
    scaled_gradients = torch.autograd.grad((got.output * (scale * grad_output).float()).sum(), inputs)
    for name, ours, theirs in zip(Inputs._fields, scaled_gradients, exact_gradients, strict=True):
        assert relative_error(ours.double() / scale, theirs) < gradient_bound, name


def _solved(inputs: Inputs, solver: ConjugateGradient) -> tuple[Tensor, Tensor]:
    """The solved queries [B, T, H, K] that the rule reads out with, and their steps."""
    layout = chunk_layout(*inputs.q.shape[:2])
    q, k, v, log_decay, write, ridge = inputs[:6]
    chunks, _ = MesaChunks.build(k, v, log_decay, write, ridge, None, inputs.state, layout)
    queries = layout.view(layout.pad(q))
    value = torch.empty(layout.rows, layout.chunks * layout.chunk, *q.shape[2:])
    steps = torch.empty(chunks.write.shape, dtype=torch.int32)
    for tile in chunks.tiles(solver):
        solution = solve(chunks.systems(tile), tile.gather(queries, "rhs"), solver, tile.workspace)
        tile.scatter(layout.view(value), solution.value)
        steps[tile.where] = solution.steps
    return layout.unpad(value), layout.merge(steps.unflatten(0, chunks.grid), torch.int32)


def _residuals(inputs: Inputs, solved: Tensor) -> Tensor:
    """||q - (H_t + ridge) x|| / ||q|| of every token [B, T, H], with H_t token by token in float64."""
    exact = inputs.to(torch.float64)
    kk, residuals = exact.kk, []
    for token in range(exact.q.shape[1]):
        k, x = exact.k[:, token], solved[:, token].double()
        gamma, write = exact.log_decay[:, token].exp(), exact.write[:, token]
        kk = gamma[..., None, None] * kk + write[..., None, None] * k[..., :, None] * k[..., None, :]
        product = (kk @ x[..., None])[..., 0] + exact.ridge * x
        q = exact.q[:, token]
        residuals.append((q - product).norm(dim=-1) / q.norm(dim=-1))
    return torch.stack(residuals, dim=1)


@pytest.mark.parametrize("preconditioner", ["auto", None])
def test_steps_are_true(preconditioner: str | None) -> None:
    """Every token that says it converged did: its float64 residual is within twice the tolerance."""
    inputs = make_inputs(1, 1024, 2, 64, 8, correlated=True).to(torch.float32)
    solver = ConjugateGradient(max_steps=30, tolerance=1e-4, preconditioner=preconditioner)
    solved, steps = _solved(inputs, solver)
    residuals = _residuals(inputs, solved)
    assert bool(((residuals < 2e-4) | (steps == 30)).all())
    assert torch.equal(steps, mesa(*inputs[:6], inputs.state, solver=solver).steps)


@pytest.mark.parametrize("gamma", [1.0, 0.9975])
def test_stiff_heads_converge(gamma: float) -> None:
    """Where 30 plain steps leave most tokens unsolved, the default settings solve every one in a few."""
    inputs = make_inputs(1, 4096, 1, 128, 8, **{**STIFF, "gamma": (gamma, gamma)}).to(torch.float32)
    inputs = inputs._replace(kk=torch.zeros(1, 1, 128, 128), kv=torch.zeros(1, 1, 128, 8))
    solved, steps = _solved(inputs, ConjugateGradient())
    assert int(steps.max()) <= 4
    assert float(_residuals(inputs, solved).max()) < 2e-4
    _, plain = _solved(inputs, ConjugateGradient(preconditioner=None))
    assert float((plain == 30).float().mean()) > 0.5


def test_easy_heads_stop_early_beside_a_slow_one() -> None:
    inputs = make_inputs(1, 1024, 2, 128, 8, gamma=(0.5, 0.999), ridge=(0.5, 0.5)).to(torch.float32)
    solver = ConjugateGradient(preconditioner=None)
    easy = Inputs(
        *(tensor[:, :, :1] for tensor in inputs.sequences), inputs.ridge[:1], inputs.kk[:, :1], inputs.kv[:, :1]
    )
    beside = inputs._replace(log_decay=torch.cat([inputs.log_decay[..., :1], torch.zeros(1, 1024, 1)], dim=-1))
    alone = mesa(*easy[:6], easy.state, solver=solver)
    together = mesa(*beside[:6], beside.state, solver=solver)
    assert torch.equal(alone.steps[..., 0], together.steps[..., 0])
    assert float(alone.steps.float().mean()) < 8
    assert float(together.steps[..., 1].float().mean()) > 2 * float(alone.steps.float().mean())


def test_no_tolerance_means_all_steps() -> None:
    inputs = make_inputs(1, 70, 2, 8, 4).to(torch.float32)
    got = mesa(*inputs[:6], inputs.state, solver=ConjugateGradient(max_steps=7, tolerance=0))
    assert bool((got.steps == 7).all())


@pytest.mark.parametrize("scale", [1e-8, 1e-30, 1e8])
def test_scaling_the_query_scales_the_answer_and_nothing_else(scale: float) -> None:
    inputs = make_inputs(1, 200, 2, 16, 4).to(torch.float32)
    # A power of two, so that scaling rounds nothing.
    factor = 2.0 ** round(torch.tensor(scale).log2().item())
    plain = mesa(*inputs[:6], inputs.state)
    scaled = mesa(inputs.q * factor, *inputs[1:6], inputs.state)
    assert torch.equal(plain.output * factor, scaled.output)
    assert torch.equal(plain.steps, scaled.steps)


def _equal_tokens(inputs: Inputs) -> Inputs:
    return inputs._replace(
        q=inputs.q[:, :1].expand_as(inputs.q),
        k=inputs.k[:, :1].expand_as(inputs.k),
        v=inputs.v[:, :1].expand_as(inputs.v),
        log_decay=torch.zeros_like(inputs.log_decay),
        write=torch.ones_like(inputs.write),
    )


def _forget_everything(inputs: Inputs) -> Inputs:
    log_decay = inputs.log_decay.clone()
    log_decay[:, 5] = -torch.inf
    log_decay[:, 64] = -torch.inf
    log_decay[:, 90:93] = -torch.inf
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


@pytest.mark.parametrize("name", EXTREMES)
def test_extremes_stay_finite(name: str) -> None:
    inputs = EXTREMES[name](make_inputs(2, 150, 2, 16, 12).to(torch.float32)).with_grad()
    got = mesa(*inputs[:6], inputs.state)
    assert got.output.dtype == inputs.v.dtype
    assert got.state.kk.dtype == torch.float32
    found = gradients(inputs, got.output.float(), got.state, torch.ones_like(got.output).float())
    for tensor in (got.output, *got.state, *found):
        assert bool(tensor.isfinite().all())
    for tensor, gradient in zip(inputs, found, strict=True):
        assert gradient.dtype == tensor.dtype
        assert gradient.shape == tensor.shape


def test_screaming() -> None:
    """Thousands of equal tokens, none of them forgotten, make H a huge matrix of rank one."""
    inputs = _equal_tokens(make_inputs(1, 8192, 1, 32, 8).to(torch.float32))
    inputs = inputs._replace(kk=torch.zeros(1, 1, 32, 32), kv=torch.zeros(1, 1, 32, 8)).with_grad()
    got = mesa(*inputs[:6], inputs.state)
    found = gradients(inputs, got.output, got.state, torch.ones_like(got.output))
    assert all(bool(tensor.isfinite().all()) for tensor in (got.output, *got.state, *found))
    # With k = k_1 always, H = t k k^T and G = t v k^T, so the answer is in closed form (Sherman-Morrison).
    exact = inputs.to(torch.float64)
    count = torch.arange(1, 8193, dtype=torch.float64)[None, :, None, None]
    k_q, k_k = ((exact.k * other / exact.ridge).sum(-1, keepdim=True) for other in (exact.q, exact.k))
    closed_form = count * k_q / (1 + count * k_k) * exact.v
    wide = mesa(*exact[:6], exact.state, solver=EXACT).output
    assert relative_error(wide, closed_form) < 1e-9
    # Rounding G, as large as t, to float32 alone moves the read-out G x by up to 2^-24 t |v| |k| |x|, and |x| reaches
    # |q| / ridge; a rounding for each of the 128 chunks adds up at worst to 128 of them.
    bound = 128 * 2**-24 * 8192 * float(exact.v.abs().max()) / float(exact.ridge.min())
    assert float((got.output.detach() - closed_form).abs().max()) < bound


def test_half_precision_loses_only_the_rounding_of_the_inputs() -> None:
    inputs = make_inputs(1, 300, 2, 32, 16).to(torch.float32)
    rounded = Inputs(*(tensor.bfloat16() for tensor in inputs[:6]), *inputs[6:])
    got = mesa(*rounded[:6], rounded.state).output
    expected = mesa(*(tensor.float() for tensor in rounded[:6]), rounded.state).output
    # The output is rounded once, to 8 bits.
    torch.testing.assert_close(got.float(), expected, rtol=2**-8, atol=0.0)


WRONG: dict[str, tuple[str, Any]] = {
    "q has too few dimensions": ("q", lambda i: i._replace(q=i.q[0])),
    "k of another length": ("k", lambda i: i._replace(k=i.k[:, 1:])),
    "v of another batch": ("v", lambda i: i._replace(v=i.v[:1])),
    "a gate per channel": ("log_decay", lambda i: i._replace(log_decay=i.k)),
    "write of other heads": ("write", lambda i: i._replace(write=i.write[..., :1])),
    "ridge of another size": ("ridge", lambda i: i._replace(ridge=i.ridge[:, 1:])),
    "ridge of zero": ("ridge", lambda i: i._replace(ridge=i.ridge * 0)),
    "negative ridge": ("ridge", lambda i: i._replace(ridge=-i.ridge)),
    "integer keys": ("k", lambda i: i._replace(k=i.k.int())),
    "values on another device": ("v", lambda i: i._replace(v=i.v.to("meta"))),
    "state of other sequences": ("state.kk", lambda i: i._replace(kk=i.kk[:1])),
    "state of another value size": ("state.kv", lambda i: i._replace(kv=i.kv[..., 1:])),
    "state in 16 bits": ("state.kk", lambda i: i._replace(kk=i.kk.half())),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs_are_named(name: str) -> None:
    argument, spoil = WRONG[name]
    inputs = spoil(make_inputs(2, 6, 2, 4, 3).to(torch.float32))
    with pytest.raises(ValueError, match=rf"^{argument}: got .*expected"):
        mesa(*inputs[:6], MesaState(inputs.kk, inputs.kv))


@pytest.mark.parametrize(
    ("batch", "bounds"), [(2, [0, 6]), (1, [0, 5]), (1, [1, 6]), (1, [0, 4, 2, 6]), (1, [0.0, 6.0]), (1, [[0, 6]])]
)
def test_wrong_bounds_are_named(batch: int, bounds: Any) -> None:
    inputs = make_inputs(batch, 6, 2, 4, 3)
    with pytest.raises(ValueError, match=r"^cu_seqlens: got .*expected"):
        mesa(*inputs[:6], cu_seqlens=torch.tensor(bounds))


def test_wrong_backend_and_settings_are_named() -> None:
    inputs = make_inputs(1, 6, 2, 4, 3)
    with pytest.raises(ValueError, match=r"^backend: got 'cuda'.*expected one of"):
        mesa(*inputs[:6], backend="cuda")
    for wrong in ({"max_steps": -1}, {"max_steps": 1.5}, {"tolerance": -0.1}, {"preconditioner": "jacobi"}):
        with pytest.raises(ValueError, match=rf"^{next(iter(wrong))}: got .*expected"):
            ConjugateGradient(**wrong)
