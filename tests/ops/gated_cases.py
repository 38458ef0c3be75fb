"""What the tests of the gated ops share: every op beside its reference, and how to run both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
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


def inside(*shape: int) -> Tensor:
    """Numbers in [0, 1] that stay so when finite differences move them."""
    return 0.01 + 0.98 * uniform(*shape)


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
        every = {"log_decay": -inside(*shape) * speed, "write": inside(*shape)}
        tensors = sequence(batch, time, heads) | {name: every[name] for name in names}
        if signed:
            tensors["sign"] = torch.where(uniform(*shape) < 0.3, -1.0, 1.0).double()
        return tensors

    return make


def mlstm_inputs(batch: int, time: int, heads: int) -> Tensors:
    gates = {"log_forget": -inside(batch, time, heads), "log_input": 2 * normal(batch, time, heads)}
    return sequence(batch, time, heads) | gates


def longhorn_inputs(batch: int, time: int, heads: int) -> Tensors:
    return sequence(batch, time, heads) | {"precision": inside(batch, time, heads, V)}


def lru_inputs(batch: int, time: int, heads: int) -> Tensors:
    return {"x": normal(batch, time, heads * K), "log_decay": -inside(batch, time, heads * K)}


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
