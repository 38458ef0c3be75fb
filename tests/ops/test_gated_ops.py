"""One suite over all the gated ops: each must be its token-by-token reference, however its tokens are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.gated_cases import OPS, B, H, assert_same, every_op, gradients, leaves, run, run_in_pieces
from torch import Tensor


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


PUBLIC_NAMES = {"gla": "gated_linear_attention", "mamba2": "gated_linear_attention", "mlstm": "mlstm"} | {
    "gla_signed": "gated_linear_attention",
    **dict.fromkeys(["deltanet", "gated_deltanet", "gated_deltanet_signed"], "gated_delta_rule"),
    **{name: name for name in ("longhorn", "rg_lru")},
}


@every_op
def test_second_derivatives_are_those_of_the_reference_or_refused(name: str) -> None:
    """After a plain sum too, whose gradient arrives as a constant, and where one tensor alone is asked for."""
    inputs = OPS[name].inputs(B, 6, H)
    tensors = leaves(inputs)

    def penalty(backend: str) -> Tensor:
        output: Tensor = run(name, inputs, backend=backend)[0]
        first = torch.autograd.grad(output.sum(), tensors, create_graph=True)
        return torch.stack([gradient.square().sum() for gradient in first]).sum() + output.sum()

    (second,) = torch.autograd.grad(penalty("reference"), tensors[0])
    (first,) = torch.autograd.grad(run(name, inputs)[0].sum(), tensors[0])
    assert not torch.allclose(second, first)
    with pytest.raises(RuntimeError, match=rf"\b{PUBLIC_NAMES[name]}\b.*: got a request for second derivatives"):
        penalty("chunked")
