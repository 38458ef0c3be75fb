"""The gated ops at the edges: extreme gates, nothing at all, few bits, strange strides, wrong arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.ops.gated_cases import OPS, B, H, Tensors, assert_same, every_op, gradients, leaves, run
from torch import Tensor


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


NUMBERS = {
    "log_decay": ([0.1, torch.inf], "at most 0"),
    "log_forget": ([0.1, torch.inf], "at most 0"),
    "log_input": ([torch.inf], "finite"),
    "write": ([-0.1, 1.1], r"in \[0, 1\]"),
    "precision": ([-0.1, torch.inf], "at least 0"),
    "sign": ([0.0, 0.5, 2.0], r"\+1 or -1"),
}
"""Numbers that no gate of this name may be, and what the refusal speaks of."""


@every_op
@pytest.mark.parametrize("time", [1, 6])
@pytest.mark.parametrize("backend", ["auto", "chunked", "reference"])
def test_gates_out_of_their_range_are_named(name: str, time: int, backend: str) -> None:
    inputs = OPS[name].inputs(B, time, H)
    for gate in inputs.keys() & NUMBERS.keys():
        wrong, about = NUMBERS[gate]
        if gate == "write" and "deltanet" in name:
            wrong, about = [torch.inf, -torch.inf], "finite"
        for number in [*wrong, torch.nan]:
            spoilt = inputs[gate].clone()
            spoilt.view(-1)[-1] = number
            with pytest.raises(ValueError, match=rf"^{gate}: got values from .*{number}.*, expected .*{about}"):
                run(name, inputs | {gate: spoilt}, backend=backend)


@pytest.mark.parametrize("name", ["deltanet", "gated_deltanet"])
@pytest.mark.parametrize("write", [-0.5, 2.0])
def test_the_delta_rule_takes_any_step(name: str, write: float) -> None:
    inputs = OPS[name].inputs(B, 70, H)
    inputs["write"].fill_(write)
    assert_same(run(name, inputs), run(name, inputs, truth=True))


@pytest.mark.parametrize("time", [1, 70])
@pytest.mark.parametrize("name", ["gla", "mlstm", "gated_deltanet", "longhorn"])
def test_the_callers_choice_of_matrix_products_does_not_reach_inside(
    name: str, time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorFloat-32 would round what a product takes to ten bits."""
    inside, product = [], torch.bmm

    def recorded(*args: Any, **options: Any) -> Tensor:
        inside.append(torch.get_float32_matmul_precision())
        return product(*args, **options)

    monkeypatch.setattr(torch, "bmm", recorded)
    inputs = {key: tensor.float() for key, tensor in OPS[name].inputs(B, time, H).items()}
    tensors = leaves(inputs)
    torch.set_float32_matmul_precision("high")
    try:
        gradients(run(name, inputs, backend="chunked"), tensors)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert set(inside) == {"highest"}
