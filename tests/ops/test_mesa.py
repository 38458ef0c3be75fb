"""The chunkwise Mesa rule in float64 against the token-by-token reference, however its tokens are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.mesa_cases import EXACT, Inputs, concatenated, gradients, make_inputs, token_by_token
from torch import Tensor

from mesanet.ops import mesa as mesa_module
from mesanet.ops import reference
from mesanet.ops.mesa import mesa
from mesanet.ops.solver import ConjugateGradient
from mesanet.ops.state import MesaState

# A residual of 1e-13 times a condition number of a few hundred, and as many roundings.
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


@pytest.mark.parametrize("key", [1, 16, 60, 64, 128, 192])
@pytest.mark.parametrize("time", [1, 2, 63, 64, 65, 200, 1000])
def test_chunked_is_reference(time: int, key: int) -> None:
    inputs = make_inputs(1, time, 2, key, key + 3)
    expected, after = reference.mesa(*inputs[:6], inputs.state)
    got = mesa(*inputs[:6], inputs.state, solver=EXACT)
    torch.testing.assert_close(got.output, expected, **CLOSE)
    torch.testing.assert_close(got.state.kk, after.kk, **CLOSE)
    torch.testing.assert_close(got.state.kv, after.kv, **CLOSE)


@pytest.mark.parametrize("preconditioner", ["auto", None])
@pytest.mark.parametrize("time", [1, 63, 64, 130])
def test_gradients_are_those_of_the_exact_solve(time: int, preconditioner: str | None) -> None:
    inputs = make_inputs(2, time, 2, 8, 5).with_grad()
    grad_output = torch.randn(2, time, 2, 5, dtype=torch.float64)
    solver = ConjugateGradient(max_steps=500, tolerance=1e-13, preconditioner=preconditioner)
    got = mesa(*inputs[:6], inputs.state, solver=solver)
    expected = reference.mesa(*inputs[:6], inputs.state)
    for ours, theirs in zip(
        gradients(inputs, got.output, got.state, grad_output), gradients(inputs, *expected, grad_output), strict=True
    ):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("cu_seqlens", [None, [0, 2, 2, 5]])
def test_gradcheck(cu_seqlens: list[int] | None) -> None:
    bounds = None if cu_seqlens is None else torch.tensor(cu_seqlens)
    inputs = make_inputs(1, 5, 2, 3, 2, sequences=None if bounds is None else 3).with_grad()

    def outputs(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        got = mesa(*tensors[:6], MesaState(*tensors[6:]), solver=EXACT, cu_seqlens=bounds)
        return got.output, got.state.kk, got.state.kv

    assert torch.autograd.gradcheck(outputs, tuple(inputs))


def test_gradcheck_across_chunks() -> None:
    inputs = make_inputs(1, 67, 2, 3, 2).with_grad()

    def outputs(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        got = mesa(*tensors[:6], MesaState(*tensors[6:]), solver=EXACT)
        return got.output, got.state.kk, got.state.kv

    assert torch.autograd.gradcheck(outputs, tuple(inputs), fast_mode=True)


@settings(max_examples=12)
@given(st.lists(st.integers(0, 150), max_size=4), st.integers(0, 2**31))
def test_whole_is_split(cuts: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    inputs = make_inputs(2, 150, 2, 6, 4).with_grad()
    whole = mesa(*inputs[:6], inputs.state, solver=EXACT)
    state, parts = inputs.state, []
    for begin, end in pairwise([0, *sorted(cuts), 150]):
        pieces = [tensor[:, begin:end] for tensor in inputs.sequences]
        parts.append(mesa(*pieces, inputs.ridge, state, solver=EXACT))
        state = parts[-1].state
    _assert_same(inputs, whole.output, whole.state, concatenated(parts), state)


def test_whole_is_token_by_token() -> None:
    inputs = make_inputs(2, 70, 2, 6, 4).with_grad()
    whole = mesa(*inputs[:6], inputs.state, solver=EXACT)
    state, parts = inputs.state, []
    for token in range(70):
        pieces = [tensor[:, token : token + 1] for tensor in inputs.sequences]
        parts.append(mesa(*pieces, inputs.ridge, state, solver=EXACT))
        state = parts[-1].state
    _assert_same(inputs, whole.output, whole.state, concatenated(parts), state)


@settings(max_examples=12)
@given(st.lists(st.integers(0, 140), min_size=1, max_size=5), st.integers(0, 2**31))
def test_packed_is_separate(lengths: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    inputs = make_inputs(1, int(bounds[-1]), 2, 6, 4, sequences=len(lengths)).with_grad()
    packed = mesa(*inputs[:6], inputs.state, solver=EXACT, cu_seqlens=bounds)
    parts = []
    for row, (begin, end) in enumerate(pairwise(bounds.tolist())):
        pieces = [tensor[:, begin:end] for tensor in inputs.sequences]
        own = MesaState(inputs.kk[row : row + 1], inputs.kv[row : row + 1])
        parts.append(mesa(*pieces, inputs.ridge, own, solver=EXACT))
    state = MesaState(torch.cat([part.state.kk for part in parts]), torch.cat([part.state.kv for part in parts]))
    _assert_same(inputs, packed.output, packed.state, concatenated(parts), state)


def test_packed_tokens_never_see_another_sequence() -> None:
    inputs = make_inputs(1, 90, 2, 6, 4, sequences=2)
    bounds = torch.tensor([0, 40, 90])
    before = mesa(*inputs[:6], inputs.state, cu_seqlens=bounds)
    others = [tensor.clone() for tensor in inputs.sequences]
    for tensor in others:
        tensor[:, :40] = torch.rand_like(tensor[:, :40])
    others[3][:, :40] *= -1
    after = mesa(*others, inputs.ridge, inputs.state, cu_seqlens=bounds)
    assert torch.equal(before.output[:, 40:], after.output[:, 40:])
    assert torch.equal(before.steps[:, 40:], after.steps[:, 40:])
    assert torch.equal(before.state.kv[1], after.state.kv[1])


@pytest.mark.parametrize("time", [5, 130])
def test_negative_gates(time: int) -> None:
    inputs = make_inputs(2, time, 2, 6, 4, ridge=(50.0, 60.0)).with_grad()
    sign = torch.where(torch.rand(2, time, 2) < 0.5, -1.0, 1.0).double()
    grad_output = torch.randn(2, time, 2, 4, dtype=torch.float64)
    got = mesa(*inputs[:6], inputs.state, solver=EXACT, sign=sign)
    expected, after = reference.mesa(*inputs[:6], inputs.state, sign=sign)
    torch.testing.assert_close(got.output, expected, **CLOSE)
    for ours, theirs in zip(
        gradients(inputs, got.output, got.state, grad_output),
        gradients(inputs, expected, after, grad_output),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("backend", ["chunked", "reference", "auto"])
def test_backends_agree(backend: str) -> None:
    inputs = make_inputs(2, 20, 2, 6, 4)
    got = mesa(*inputs[:6], inputs.state, solver=EXACT, backend=backend)
    torch.testing.assert_close(got.output, reference.mesa(*inputs[:6], inputs.state)[0], **CLOSE)


def test_stiff_heads_are_the_reference() -> None:
    """Nothing forgotten, correlated keys: what float32 is later measured against."""
    inputs = make_inputs(1, 1000, 2, 64, 16, gamma=(1.0, 1.0), ridge=(0.25, 0.25), correlated=True)
    expected, after = reference.mesa(*inputs[:6], inputs.state)
    got = mesa(*inputs[:6], inputs.state, solver=EXACT)
    torch.testing.assert_close(got.output, expected, **CLOSE)
    torch.testing.assert_close(got.state.kv, after.kv, **CLOSE)


def test_decoding_token_by_token_is_the_whole() -> None:
    """Without gradients, as a model generates."""
    inputs = make_inputs(2, 200, 3, 24, 5)
    with torch.no_grad():
        whole = mesa(*inputs[:6], inputs.state, solver=EXACT)
        single = token_by_token(inputs, solver=EXACT)
    torch.testing.assert_close(single.output, whole.output, **CLOSE)
    torch.testing.assert_close(single.state.kk, whole.state.kk, **CLOSE)
    torch.testing.assert_close(single.state.kv, whole.state.kv, **CLOSE)


@pytest.mark.parametrize("preconditioner", ["auto", None])
@pytest.mark.parametrize("time", [1, 20])
def test_only_the_symmetric_part_of_a_state_counts(time: int, preconditioner: str | None) -> None:
    inputs = make_inputs(2, time, 2, 6, 4)
    skew = torch.randn_like(inputs.kk)
    crooked = MesaState(inputs.kk + skew - skew.mT, inputs.kv)
    solver = ConjugateGradient(max_steps=500, tolerance=1e-13, preconditioner=preconditioner)
    for backend in ("auto", "chunked", "reference"):
        with torch.no_grad():
            straight = mesa(*inputs[:6], inputs.state, solver=solver, backend=backend)
            got = mesa(*inputs[:6], crooked, solver=solver, backend=backend)
        torch.testing.assert_close(got.output, straight.output, **CLOSE)
        torch.testing.assert_close(got.state.kk, straight.state.kk, **CLOSE)
        torch.testing.assert_close(got.state.kk, got.state.kk.mT, **CLOSE)


@pytest.mark.parametrize("gradient", [False, True])
def test_the_backend_asked_for_is_the_one_that_runs(gradient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(2, 1, 2, 6, 4)
    ran = []
    for name in ("mesa_step", "chunk_layout", "_token_by_token"):
        function = getattr(mesa_module, name)
        monkeypatch.setattr(mesa_module, name, lambda *a, f=function, n=name: (ran.append(n), f(*a))[1])
    tensors = inputs.with_grad() if gradient else inputs
    for backend in ("auto", "chunked", "reference"):
        mesa(*tensors[:6], tensors.state, backend=backend)
    assert ran == ["chunk_layout" if gradient else "mesa_step", "chunk_layout", "_token_by_token"]


@pytest.mark.parametrize("backend", ["auto", "chunked", "reference"])
@pytest.mark.parametrize("time", [1, 20])
@pytest.mark.parametrize(
    ("q", "rest", "state", "expected"),
    [
        (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32),
        (torch.float16, torch.float16, torch.float32, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32, torch.float32),
        (torch.float32, torch.float32, torch.float64, torch.float32),
        (torch.float64, torch.float32, torch.float32, torch.float64),
        (torch.float64, torch.float64, torch.float64, torch.float64),
    ],
)
def test_dtypes(
    q: torch.dtype, rest: torch.dtype, state: torch.dtype, expected: torch.dtype, time: int, backend: str
) -> None:
    """The output has that of v, the state float32 unless a sequence is float64, gradients those of their tensors."""
    exact = make_inputs(2, time, 2, 6, 4)
    inputs = Inputs(exact.q.to(q), *(t.to(rest) for t in exact[1:6]), *(t.to(state) for t in exact[6:])).with_grad()
    got = mesa(*inputs[:6], inputs.state, backend=backend)
    with torch.no_grad():
        without_graph = mesa(*inputs[:6], inputs.state, backend=backend)
    for result in (got, without_graph):
        assert result.output.dtype == rest
        assert result.state.kk.dtype == result.state.kv.dtype == expected
    grad_output = torch.ones_like(got.output)
    for tensor, gradient in zip(inputs, torch.autograd.grad(got.output, inputs, grad_output), strict=True):
        assert gradient.dtype == tensor.dtype
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("backend", ["auto", "chunked", "reference"])
@pytest.mark.parametrize(("batch", "time", "heads"), [(0, 1, 2), (2, 1, 0), (0, 5, 2), (2, 5, 0), (2, 0, 2), (0, 0, 0)])
def test_nothing_in_nothing_out(batch: int, time: int, heads: int, backend: str) -> None:
    inputs = make_inputs(batch, time, heads, 4, 3, gamma=(0.5, 0.9))
    for state in (inputs.state, None):
        with torch.no_grad():
            got = mesa(*inputs[:6], state, backend=backend)
        assert got.output.shape == (batch, time, heads, 3)
        assert got.steps.shape == (batch, time, heads)
        assert got.state.kk.shape == (batch, heads, 4, 4)
        assert got.state.kv.shape == (batch, heads, 4, 3)


@pytest.mark.parametrize("backend", ["auto", "chunked", "reference"])
@pytest.mark.parametrize("bounds", [[0], [0, 0], [0, 0, 0, 5, 5]])
def test_packed_sequences_without_tokens(bounds: list[int], backend: str) -> None:
    rows = len(bounds) - 1
    inputs = make_inputs(1, bounds[-1], 2, 4, 3, sequences=rows)
    for state in (inputs.state, None):
        got = mesa(*inputs[:6], state, cu_seqlens=torch.tensor(bounds), backend=backend)
        assert got.output.shape == inputs.v.shape
        assert got.state.kk.shape == inputs.kk.shape
        if bounds[-1] == 0 and state is not None:
            torch.testing.assert_close(got.state.kk, inputs.kk, **CLOSE)


def test_no_steps_is_the_papers_start_value() -> None:
    inputs = make_inputs(1, 80, 2, 6, 4)
    got = mesa(*inputs[:6], inputs.state, solver=ConjugateGradient(max_steps=0))
    diagonal, kv = inputs.kk.diagonal(dim1=-2, dim2=-1), inputs.kv
    for token in range(80):
        gamma, write = inputs.log_decay[:, token].exp(), inputs.write[:, token]
        k, v = inputs.k[:, token], inputs.v[:, token]
        diagonal = gamma[..., None] * diagonal + write[..., None] * k.square()
        kv = gamma[..., None, None] * kv + write[..., None, None] * k[..., :, None] * v[..., None, :]
        solved = inputs.q[:, token] / (diagonal + inputs.ridge)
        torch.testing.assert_close(got.output[:, token], (kv * solved[..., None]).sum(-2), **CLOSE)
    assert not got.steps.any()


def _assert_same(inputs: object, output: Tensor, state: MesaState, other: Tensor, other_state: MesaState) -> None:
    """Outputs, states and the gradients for every input agree."""
    torch.testing.assert_close(output, other, **CLOSE)
    torch.testing.assert_close(state.kk, other_state.kk, **CLOSE)
    torch.testing.assert_close(state.kv, other_state.kv, **CLOSE)
    grad_output = torch.randn_like(output)
    ours = gradients(inputs, output, state, grad_output)  # type: ignore[arg-type]
    theirs = gradients(inputs, other, other_state, grad_output)  # type: ignore[arg-type]
    for one, another in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, another, **CLOSE)


@pytest.mark.parametrize("preconditioner", ["auto", None])
@pytest.mark.parametrize("signed", [False, True])
def test_decoding_is_the_parallel_form(preconditioner: str | None, signed: bool) -> None:
    """Without gradients a single token takes a path of its own; both must tell the same."""
    inputs = make_inputs(3, 1, 2, 24, 5, ridge=(50.0, 60.0) if signed else (0.25, 1.0))
    sign = torch.tensor([1.0, -1.0], dtype=torch.float64).expand(3, 1, 2) if signed else None
    solver = ConjugateGradient(max_steps=500, tolerance=1e-13, preconditioner=preconditioner)
    step = mesa(*inputs[:6], inputs.state, solver=solver, sign=sign)
    chunked_inputs = inputs.with_grad()
    chunked = mesa(*chunked_inputs[:6], chunked_inputs.state, solver=solver, sign=sign)
    torch.testing.assert_close(step.output, chunked.output.detach(), **CLOSE)
    torch.testing.assert_close(step.state.kk, chunked.state.kk.detach(), **CLOSE)
    torch.testing.assert_close(step.state.kv, chunked.state.kv.detach(), **CLOSE)
