"""One suite over all the gated ops: each must be its token-by-token reference, however its tokens are cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mesanet.ops import reference
from mesanet.ops.delta_rule import gated_delta_rule
from mesanet.ops.linear_attention import gated_linear_attention
from mesanet.ops.longhorn import longhorn
from mesanet.ops.mlstm import mlstm
from mesanet.ops.rg_lru import rg_lru
from mesanet.ops.state import MlstmState

B, H, K, V = 2, 3, 5, 4
# A few thousand products of numbers of order one in float64, with unit roundoff 1e-16.
EXACT = {"rtol": 1e-10, "atol": 1e-10}

Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Op:
    """An op, its reference, and how to make arguments for it."""

    function: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Callable[[int, int, int], Tensors]
    """(batch, time, heads) -> float64 arguments."""
    state: Callable[[int, int], Tensors]
    """(sequences, heads) -> float64 state, as its parts."""
    pack: Callable[..., Any] = lambda state: state
    """Makes the state that the op takes out of its parts."""
    gate: str = "log_decay"
    """The argument for which minus infinity means to forget everything."""


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def uniform(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64)


def sequence(batch: int, time: int, heads: int) -> Tensors:
    shape = (batch, time, heads)
    # Keys of length one: with longer ones the delta rule is not stable.
    keys = torch.nn.functional.normalize(normal(*shape, K), dim=-1)
    return {"q": normal(*shape, K), "k": keys, "v": normal(*shape, V)}


def gated(*names: str, signed: bool = False) -> Callable[[int, int, int], Tensors]:
    def make(batch: int, time: int, heads: int) -> Tensors:
        shape = (batch, time, heads)
        # Some heads forget a lot and some next to nothing.
        speed = torch.logspace(-3, 0, heads, dtype=torch.float64)
        every = {"log_decay": -uniform(*shape) * speed, "write": uniform(*shape)}
        tensors = sequence(batch, time, heads) | {name: every[name] for name in names}
        if signed:
            tensors["sign"] = torch.where(uniform(*shape) < 0.3, -1.0, 1.0).double()
        return tensors

    return make


def mlstm_inputs(batch: int, time: int, heads: int) -> Tensors:
    gates = {"log_forget": -uniform(batch, time, heads), "log_input": 2 * normal(batch, time, heads)}
    return sequence(batch, time, heads) | gates


def longhorn_inputs(batch: int, time: int, heads: int) -> Tensors:
    return sequence(batch, time, heads) | {"precision": uniform(batch, time, heads, V)}


def lru_inputs(batch: int, time: int, heads: int) -> Tensors:
    return {"x": normal(batch, time, heads * K), "log_decay": -uniform(batch, time, heads * K)}


def matrix_state(rows: int, heads: int) -> Tensors:
    return {"state": normal(rows, heads, K, V)}


def mlstm_state(rows: int, heads: int) -> Tensors:
    shapes = {"kv": (rows, heads, K, V), "normaliser": (rows, heads, K), "stabiliser": (rows, heads)}
    return {name: normal(*shape) for name, shape in shapes.items()}


def delta(*names: str, signed: bool = False) -> Op:
    def with_decay(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *, log_decay=None, **rest: function(log_decay=log_decay, **rest)

    return Op(
        function=with_decay(gated_delta_rule),
        reference=with_decay(reference.gated_delta_rule),
        inputs=gated(*names, signed=signed),
        state=matrix_state,
    )


def linear(*names: str, signed: bool = False) -> Op:
    return Op(
        function=gated_linear_attention,
        reference=reference.gated_linear_attention,
        inputs=gated(*names, signed=signed),
        state=matrix_state,
    )


OPS = {
    "gla": linear("log_decay", "write"),
    "mamba2": linear("log_decay"),
    "gla_signed": linear("log_decay", "write", signed=True),
    "deltanet": delta("write"),
    "gated_deltanet": delta("log_decay", "write"),
    "gated_deltanet_signed": delta("log_decay", "write", signed=True),
    "mlstm": Op(
        function=mlstm,
        reference=reference.mlstm,
        inputs=mlstm_inputs,
        state=mlstm_state,
        pack=lambda **parts: MlstmState(**parts),
        gate="log_forget",
    ),
    "longhorn": Op(
        function=longhorn, reference=reference.longhorn, inputs=longhorn_inputs, state=matrix_state, gate="precision"
    ),
    "rg_lru": Op(
        function=rg_lru,
        reference=reference.rg_lru,
        inputs=lru_inputs,
        state=lambda rows, heads: {"state": normal(rows, heads * K)},
    ),
}
every_op = pytest.mark.parametrize("name", list(OPS))


def run(name: str, inputs: Tensors, state: Tensors | None = None, truth: bool = False, **options: Any) -> list[Tensor]:
    """The output and the parts of the last state."""
    op = OPS[name]
    packed = None if state is None else op.pack(**state)
    output, last = (op.reference if truth else op.function)(**inputs, state=packed, **options)
    return [output, last] if isinstance(last, Tensor) else [output, *last]


def leaves(*groups: Tensors) -> list[Tensor]:
    """Every tensor that has a gradient, marked so."""
    return [tensor.requires_grad_() for group in groups for name, tensor in group.items() if name != "sign"]


def gradients(results: list[Tensor], tensors: list[Tensor], seed: int = 1) -> list[Tensor]:
    """Gradients for fixed random weights of all the results; zeros for tensors that do not matter."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(result.shape, dtype=torch.float64, generator=generator) for result in results]
    loss = sum((result * weight).sum() for result, weight in zip(results, weights, strict=True))
    assert isinstance(loss, Tensor)
    return list(torch.autograd.grad(loss, tensors, materialize_grads=True, allow_unused=True, retain_graph=True))


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


@every_op
@pytest.mark.parametrize("time", [1, 2, 63, 64, 65, 200])
def test_equals_reference(name: str, time: int) -> None:
    inputs, state = OPS[name].inputs(B, time, H), OPS[name].state(B, H)
    tensors = leaves(inputs, state)
    ours, truth = run(name, inputs, state, backend="chunked"), run(name, inputs, state, truth=True)
    assert_same(ours, truth)
    assert_same(gradients(ours, tensors), gradients(truth, tensors))


@every_op
def test_equals_reference_with_more_heads_than_fit_one_step(name: str) -> None:
    inputs = OPS[name].inputs(3, 130, 7)
    tensors = leaves(inputs)
    ours, truth = run(name, inputs), run(name, inputs, truth=True)
    assert_same(ours, truth)
    assert_same(gradients(ours, tensors), gradients(truth, tensors))


@every_op
@pytest.mark.parametrize("bounds", [None, [0, 1, 1, 66]])
def test_gradients_are_those_of_finite_differences(name: str, bounds: list[int] | None) -> None:
    batch, rows = (B, B) if bounds is None else (1, 3)
    inputs, state = OPS[name].inputs(batch, 66, 2), OPS[name].state(rows, 2)
    cu_seqlens = None if bounds is None else torch.tensor(bounds)

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        named = iter(tensors)
        args = {key: tensor if key == "sign" else next(named) for key, tensor in inputs.items()}
        parts = {key: next(named) for key in state}
        return tuple(run(name, args, parts, cu_seqlens=cu_seqlens, backend="chunked"))

    # The fast mode checks random projections of the whole Jacobian, so that two chunks of tokens can be afforded.
    assert torch.autograd.gradcheck(function, leaves(inputs, state), fast_mode=True)


@settings(max_examples=6)
@given(cuts=st.lists(st.integers(0, 130), max_size=5))
@every_op
def test_whole_equals_split(name: str, cuts: list[int]) -> None:
    inputs, state = OPS[name].inputs(B, 130, H), OPS[name].state(B, H)
    tensors = leaves(inputs, state)
    whole = run(name, inputs, state)
    split = run_in_pieces(name, inputs, state, [0, *sorted(cuts), 130])
    assert_same(split, whole)
    assert_same(gradients(split, tensors), gradients(whole, tensors))


@every_op
@pytest.mark.parametrize("backend", ["auto", "chunked"])
def test_whole_equals_token_by_token(name: str, backend: str) -> None:
    inputs, state = OPS[name].inputs(B, 70, H), OPS[name].state(B, H)
    tensors = leaves(inputs, state)
    whole = run(name, inputs, state)
    single = run_in_pieces(name, inputs, state, list(range(71)), backend=backend)
    assert_same(single, whole)
    assert_same(gradients(single, tensors), gradients(whole, tensors))


def run_in_pieces(name: str, inputs: Tensors, state: Tensors | None, edges: list[int], **options: Any) -> list[Tensor]:
    """Run from each edge to the next, with the state carried."""
    outputs = []
    for begin, end in pairwise(edges):
        piece = {key: tensor[:, begin:end] for key, tensor in inputs.items()}
        output, *last = run(name, piece, state, **options)
        outputs.append(output)
        state = dict(zip(OPS[name].state(1, 1), last, strict=True))
    assert state is not None
    return [torch.cat(outputs, dim=1), *state.values()]


@every_op
@pytest.mark.parametrize("lengths", [[70, 1, 0, 64], [0, 3], [200]])
def test_packed_equals_separate(name: str, lengths: list[int]) -> None:
    inputs, state = OPS[name].inputs(1, sum(lengths), H), OPS[name].state(len(lengths), H)
    tensors = leaves(inputs, state)
    edges = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    packed = run(name, inputs, state, cu_seqlens=torch.tensor(edges, dtype=torch.int32))
    separate = []
    for row, (begin, end) in enumerate(pairwise(edges)):
        piece = {key: tensor[:, begin:end] for key, tensor in inputs.items()}
        own_state = {key: tensor[row : row + 1] for key, tensor in state.items()}
        separate.append(run(name, piece, own_state))
    outputs, *states = zip(*separate, strict=True)
    joined = [torch.cat(outputs, dim=1), *(torch.cat(parts, dim=0) for parts in states)]
    assert_same(packed, joined)
    assert_same(gradients(packed, tensors), gradients(joined, tensors))


@every_op
def test_packed_tokens_never_see_another_sequence(name: str) -> None:
    inputs = OPS[name].inputs(1, 80, H)
    cu_seqlens = torch.tensor([0, 30, 80])
    before = run(name, inputs, cu_seqlens=cu_seqlens)[0]
    changed = {key: tensor.clone() for key, tensor in inputs.items()}
    for key, tensor in changed.items():
        if key != "sign":
            tensor[:, :30] = 0.5 * tensor[:, :30] - (0.1 if "log" in key else 0.0)
    after = run(name, changed, cu_seqlens=cu_seqlens)[0]
    assert torch.equal(before[:, 30:], after[:, 30:])
    assert not torch.equal(before[:, :30], after[:, :30])


def everything_finite(name: str, inputs: Tensors, state: Tensors | None = None, **options: Any) -> list[Tensor]:
    tensors = leaves(inputs, state or {})
    results = run(name, inputs, state, **options)
    for tensor in [*results, *gradients(results, tensors)]:
        assert tensor.isfinite().all()
    return results


@every_op
@pytest.mark.parametrize("where", [slice(None), slice(60, 67)])
def test_forgetting_everything_is_allowed(name: str, where: slice) -> None:
    op = OPS[name]
    inputs, state = op.inputs(B, 130, H), op.state(B, H)
    if op.gate not in inputs or op.gate == "precision":
        pytest.skip("this rule has no forget gate")
    inputs[op.gate][:, where] = -torch.inf
    tensors = leaves(inputs, state)
    ours = everything_finite(name, inputs, state)
    truth = run(name, inputs, state, truth=True)
    assert_same(ours, truth)
    assert_same(gradients(ours, tensors), gradients(truth, tensors))


@every_op
def test_keeping_everything_and_writing_nothing_is_allowed(name: str) -> None:
    op = OPS[name]
    inputs, state = op.inputs(B, 70, H), op.state(B, H)
    shut = {"log_decay": 0.0, "log_forget": 0.0, "write": 0.0, "log_input": -torch.inf, "precision": 0.0}
    for gate, value in shut.items():
        if gate in inputs:
            inputs[gate].fill_(value)
    if "k" in inputs and "write" not in inputs:
        inputs["k"].zero_()
    if "sign" in inputs:
        inputs["sign"].fill_(1.0)
    _, *last = everything_finite(name, inputs, state)
    if name == "mlstm":  # its state is kept up to the scale that the stabiliser carries
        return
    assert_same(last, list(state.values()))


@every_op
def test_zero_keys_and_queries_are_allowed(name: str) -> None:
    inputs = OPS[name].inputs(B, 70, H)
    for key in ("q", "k", "x"):
        if key in inputs:
            inputs[key].zero_()
    output = everything_finite(name, inputs)[0]
    assert (output == 0).all()


@every_op
@pytest.mark.parametrize(("batch", "time"), [(0, 5), (0, 70), (2, 0), (0, 0)])
@pytest.mark.parametrize("backend", ["auto", "chunked"])
def test_nothing_in_nothing_out(name: str, batch: int, time: int, backend: str) -> None:
    inputs, state = OPS[name].inputs(batch, time, H), OPS[name].state(batch, H)
    output, *last = everything_finite(name, inputs, state, backend=backend)
    assert output.shape == inputs.get("v", inputs.get("x")).shape  # type: ignore[union-attr]
    assert_same(last, list(state.values()))


@every_op
def test_float32_is_close_to_float64(name: str) -> None:
    inputs = OPS[name].inputs(B, 200, H)
    tensors = leaves(inputs)
    exact = run(name, inputs)
    single_inputs = {key: tensor.detach().float() for key, tensor in inputs.items()}
    single_tensors = leaves(single_inputs)
    single = run(name, single_inputs)
    assert all(tensor.dtype == torch.float32 for tensor in single)
    results = zip(single, exact, strict=True)
    grads = zip(gradients(single, single_tensors), gradients(exact, tensors), strict=True)
    for one, other in [*results, *grads]:
        # Unit roundoff 6e-8 over sums of some hundred terms; the bound is the project's for float32.
        assert (one.double() - other).norm() <= 1e-5 * other.norm()


@pytest.mark.parametrize("name", ["deltanet", "gated_deltanet"])
def test_delta_rule_stays_accurate_for_equal_keys(name: str) -> None:
    """The triangular system of a chunk is at its worst: powers of it reach 1e17, its inverse stays below two."""
    inputs = OPS[name].inputs(B, 200, H)
    inputs["k"][:] = inputs["k"][:, :1]
    inputs["write"].fill_(0.9)
    exact_tensors, single = leaves(inputs), {key: tensor.detach().float() for key, tensor in inputs.items()}
    single_tensors = leaves(single)
    exact, ours, one_by_one = run(name, inputs, truth=True), run(name, single), run(name, single, truth=True)
    exact += gradients(exact, exact_tensors)
    ours += gradients(ours, single_tensors)
    one_by_one += gradients(one_by_one, single_tensors)
    for fast, slow, truth in zip(ours, one_by_one, exact, strict=True):
        # The gradient of the gates cancels, as most of what passes them is overwritten: float32 can't hold it to 1e-5.
        allowed = torch.maximum(1e-5 * truth.norm(), 4 * (slow - truth).norm())
        assert (fast - truth).norm() <= allowed


@every_op
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_only_rounds_inputs_and_output(name: str, dtype: torch.dtype) -> None:
    inputs = {key: tensor.to(dtype) for key, tensor in OPS[name].inputs(B, 100, H).items()}
    widened = {key: tensor.float() for key, tensor in inputs.items()}
    output, *states = run(name, inputs)
    wide_output, *wide_states = run(name, widened)
    assert output.dtype == dtype
    torch.testing.assert_close(output, wide_output.to(dtype), rtol=0, atol=0)
    for state, wide in zip(states, wide_states, strict=True):
        torch.testing.assert_close(state, wide, rtol=0, atol=0)
    tensors = leaves(inputs)
    for gradient, tensor in zip(gradients(run(name, inputs), tensors), tensors, strict=True):
        assert gradient.dtype == dtype
        assert gradient.shape == tensor.shape
        assert gradient.isfinite().all()


@every_op
def test_autocast_does_not_reach_inside(name: str) -> None:
    inputs = {key: tensor.float() for key, tensor in OPS[name].inputs(B, 100, H).items()}
    tensors = leaves(inputs)
    plain = run(name, inputs)
    plain_gradients = gradients(plain, tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = run(name, inputs)
        cast_gradients = gradients(cast, tensors)
    for one, other in zip([*cast, *cast_gradients], [*plain, *plain_gradients], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@every_op
def test_strides_do_not_matter(name: str) -> None:
    inputs, state = OPS[name].inputs(B, 100, H), OPS[name].state(B, H)
    expected = run(name, inputs, state)

    def scattered(tensor: Tensor) -> Tensor:
        return torch.stack([tensor, tensor], dim=-1).transpose(0, 1)[..., 0].transpose(0, 1)

    strange = {key: scattered(tensor) for key, tensor in inputs.items()}
    strange_state = {key: scattered(tensor) for key, tensor in state.items()}
    tensors = leaves(strange, strange_state)
    results = run(name, strange, strange_state)
    assert_same(results, expected)
    # An expanded output gradient has strides of zero.
    torch.autograd.grad(results[0].sum(), tensors, allow_unused=True)


@every_op
def test_wrong_arguments_are_named(name: str) -> None:
    inputs, state = OPS[name].inputs(B, 6, H), OPS[name].state(B, H)
    for key, tensor in inputs.items():
        with pytest.raises(ValueError, match=rf"^{key}\b"):
            run(name, inputs | {key: tensor.unsqueeze(-1)}, state)
        with pytest.raises(ValueError, match=rf"^{key}\b.*floating point"):
            run(name, inputs | {key: tensor.long()}, state)
        # The first argument says where the others have to be.
        misplaced = {"q": "k", "x": "log_decay"}.get(key, key)
        with pytest.raises(ValueError, match=rf"^{misplaced}\b.*device"):
            run(name, inputs | {key: tensor.to("meta")}, state)
    for part, tensor in state.items():
        field = part if part == "state" else f"state.{part}"
        with pytest.raises(ValueError, match=rf"^{field}\b.*shape"):
            run(name, inputs, state | {part: tensor[:1]})
        with pytest.raises(ValueError, match=rf"^{field}\b.*float16"):
            run(name, inputs, state | {part: tensor.half()})
    with pytest.raises(ValueError, match=r"^backend\b.*'fast'"):
        run(name, inputs, state, backend="fast")
    for bounds in ([0, 6], [1, 6], [0, 4, 3, 6], [0, 5]):
        batch = B if bounds == [0, 6] else 1
        rows = {key: tensor[:batch] for key, tensor in inputs.items()}
        with pytest.raises(ValueError, match=r"^cu_seqlens\b"):
            run(name, rows, cu_seqlens=torch.tensor(bounds))
