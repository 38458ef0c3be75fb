"""Wrong arguments of the Mesa rule: the complaint names the argument, what came, and what was expected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from beartype import beartype
from jaxtyping import TypeCheckError, jaxtyped
from tests.ops.mesa_cases import Inputs, make_inputs
from torch import Tensor

from mesanet.ops.mesa import mesa
from mesanet.ops.solver import ConjugateGradient
from mesanet.ops.state import MesaState


def _with(tensor: Tensor, value: float) -> Tensor:
    """A copy with one entry replaced."""
    changed = tensor.clone()
    changed[..., -1] = value
    return changed


# The argument to be named, what has to be said about it, and how to spoil it.
WRONG: dict[str, tuple[str, str, Any]] = {
    "q has too few dimensions": ("q", "shape", lambda i: i._replace(q=i.q[0])),
    "q is no tensor": ("q", "list", lambda i: i._replace(q=i.q.tolist())),
    "keys without size": ("q", "K of at least 1", lambda i: i._replace(q=i.q[..., :0], k=i.k[..., :0])),
    "k of another length": ("k", "shape", lambda i: i._replace(k=i.k[:, 1:])),
    "k of another size": ("k", "shape", lambda i: i._replace(k=i.k[..., 1:])),
    "v of another batch": ("v", "shape", lambda i: i._replace(v=i.v[:1])),
    "v is missing": ("v", "NoneType", lambda i: i._replace(v=None)),
    "a gate per channel": ("log_decay", "shape", lambda i: i._replace(log_decay=i.k)),
    "write of other heads": ("write", "shape", lambda i: i._replace(write=i.write[..., :1])),
    "ridge of another size": ("ridge", "shape", lambda i: i._replace(ridge=i.ridge[:, 1:])),
    "integer queries": ("q", "int32", lambda i: i._replace(q=i.q.int())),
    "integer keys": ("k", "int32", lambda i: i._replace(k=i.k.int())),
    "complex values": ("v", "complex64", lambda i: i._replace(v=i.v.to(torch.complex64))),
    "integer log decay": ("log_decay", "int64", lambda i: i._replace(log_decay=i.log_decay.long())),
    "boolean write": ("write", "bool", lambda i: i._replace(write=i.write > 0)),
    "integer ridge": ("ridge", "int8", lambda i: i._replace(ridge=i.ridge.to(torch.int8))),
    "queries elsewhere": ("k", "device cpu", lambda i: i._replace(q=i.q.to("meta"))),
    "keys elsewhere": ("k", "device meta", lambda i: i._replace(k=i.k.to("meta"))),
    "values elsewhere": ("v", "device meta", lambda i: i._replace(v=i.v.to("meta"))),
    "log decay elsewhere": ("log_decay", "device meta", lambda i: i._replace(log_decay=i.log_decay.to("meta"))),
    "write elsewhere": ("write", "device meta", lambda i: i._replace(write=i.write.to("meta"))),
    "ridge elsewhere": ("ridge", "device meta", lambda i: i._replace(ridge=i.ridge.to("meta"))),
    "state of keys elsewhere": (r"state\.kk", "device meta", lambda i: i._replace(kk=i.kk.to("meta"))),
    "state of values elsewhere": (r"state\.kv", "device meta", lambda i: i._replace(kv=i.kv.to("meta"))),
    "ridge of zero": ("ridge", "positive", lambda i: i._replace(ridge=_with(i.ridge, 0.0))),
    "ridge that float32 rounds to zero": ("ridge", "positive", lambda i: i._replace(ridge=_with(i.ridge, 1e-60))),
    "ridge that float32 hardly holds": ("ridge", "positive", lambda i: i._replace(ridge=_with(i.ridge, 1e-42))),
    "negative ridge": ("ridge", "positive", lambda i: i._replace(ridge=_with(i.ridge, -1.0))),
    "infinite ridge": ("ridge", "finite", lambda i: i._replace(ridge=_with(i.ridge, torch.inf))),
    "ridge that is no number": ("ridge", "nan", lambda i: i._replace(ridge=_with(i.ridge, torch.nan))),
    "gates above one": ("log_decay", "at most 0", lambda i: i._replace(log_decay=_with(i.log_decay, 0.1))),
    "gates that are no number": ("log_decay", "nan", lambda i: i._replace(log_decay=_with(i.log_decay, torch.nan))),
    "negative write": ("write", r"\[0, 1\]", lambda i: i._replace(write=_with(i.write, -0.1))),
    "write above one": ("write", r"\[0, 1\]", lambda i: i._replace(write=_with(i.write, 1.1))),
    "write that is no number": ("write", "nan", lambda i: i._replace(write=_with(i.write, torch.nan))),
    "state of other sequences": (r"state\.kk", "shape", lambda i: i._replace(kk=i.kk[:1])),
    "state of another value size": (r"state\.kv", "shape", lambda i: i._replace(kv=i.kv[..., 1:])),
    "state in 16 bits": (r"state\.kk", "float16", lambda i: i._replace(kk=i.kk.half())),
    "state of integers": (r"state\.kv", "int64", lambda i: i._replace(kv=i.kv.long())),
}


@pytest.mark.parametrize("time", [1, 6])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs_are_named(name: str, time: int) -> None:
    argument, about, spoil = WRONG[name]
    inputs = spoil(make_inputs(2, time, 2, 4, 3).to(torch.float32))
    if name == "k of another length" and time == 1:
        inputs = inputs._replace(k=torch.cat([inputs.k, inputs.k], dim=1)[:, :0])
    with pytest.raises(ValueError, match=rf"(?s)^{argument}: got .*expected") as complaint:
        mesa(*inputs[:6], MesaState(inputs.kk, inputs.kv))
    complaint.match(about)


@pytest.mark.parametrize(
    ("sign", "about"),
    [
        (torch.full((2, 6, 2), 0.5), r"\+1 or -1"),
        (torch.zeros(2, 6, 2), r"\+1 or -1"),
        (torch.full((2, 6, 2), torch.nan), r"\+1 or -1"),
        (torch.ones(2, 6, 2, dtype=torch.int8), "int8"),
        (torch.ones(2, 6), "shape"),
        (torch.ones(2, 6, 2, device="meta"), "device meta"),
        (-1.0, "float"),
    ],
)
def test_wrong_signs_are_named(sign: Any, about: str) -> None:
    inputs = make_inputs(2, 6, 2, 4, 3)
    with pytest.raises(ValueError, match=r"^sign: got .*expected") as complaint:
        mesa(*inputs[:6], sign=sign)
    complaint.match(about)


@pytest.mark.parametrize("state", [(1, 2), "state", torch.zeros(2, 2, 4, 4), {"kk": 1}])
def test_wrong_states_are_named(state: Any) -> None:
    inputs = make_inputs(2, 6, 2, 4, 3)
    with pytest.raises(ValueError, match=r"^state: got .*expected a MesaState"):
        mesa(*inputs[:6], state)


@pytest.mark.parametrize(
    ("batch", "bounds", "about"),
    [
        (2, torch.tensor([0, 6]), "batch of 2"),
        (1, torch.tensor([0, 5]), "T=6"),
        (1, torch.tensor([0, 7]), "T=6"),
        (1, torch.tensor([1, 6]), "from 0"),
        (1, torch.tensor([0, 4, 2, 6]), "rise"),
        (1, torch.tensor([], dtype=torch.long), "rise"),
        (1, torch.tensor([0.0, 6.0]), "float32"),
        (1, torch.tensor([False, True]), "bool"),
        (1, torch.tensor([[0, 6]]), "shape"),
        (1, torch.tensor([0, 6], device="meta"), "device meta"),
        (1, [0, 6], "list"),
    ],
)
def test_wrong_bounds_are_named(batch: int, bounds: Any, about: str) -> None:
    inputs = make_inputs(batch, 6, 2, 4, 3)
    with pytest.raises(ValueError, match=r"^cu_seqlens: got .*expected") as complaint:
        mesa(*inputs[:6], cu_seqlens=bounds)
    complaint.match(about)


@pytest.mark.parametrize("solver", [None, {"max_steps": 3}, 30, ConjugateGradient])
def test_wrong_solvers_are_named(solver: Any) -> None:
    inputs = make_inputs(1, 6, 2, 4, 3)
    with pytest.raises(ValueError, match=r"^solver: got .*expected a ConjugateGradient"):
        mesa(*inputs[:6], solver=solver)


@pytest.mark.parametrize("backend", ["cuda", "", None])
def test_wrong_backends_are_named(backend: Any) -> None:
    inputs = make_inputs(1, 6, 2, 4, 3)
    with pytest.raises(ValueError, match=rf"^backend: got {backend!r}, expected one of"):
        mesa(*inputs[:6], backend=backend)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_steps", -1),
        ("max_steps", 1.5),
        ("max_steps", True),
        ("tolerance", -0.1),
        ("tolerance", 1.0),
        ("tolerance", float("nan")),
        ("tolerance", "1e-4"),
        ("preconditioner", "jacobi"),
    ],
)
def test_wrong_settings_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: got {value!r}, expected"):
        ConjugateGradient(**{name: value})


def test_gates_at_the_ends_of_their_range_are_allowed() -> None:
    inputs = make_inputs(1, 6, 2, 4, 3)
    inputs.log_decay[..., 0], inputs.log_decay[..., 1] = 0.0, -torch.inf
    inputs.write[:, ::2], inputs.write[:, 1::2] = 0.0, 1.0
    sign = torch.ones(1, 6, 2)
    sign[:, 3] = -1.0
    assert bool(mesa(*inputs[:6], inputs.state).output.isfinite().all())
    assert bool(mesa(*inputs[:5], 10 * inputs.ridge, inputs.state, sign=sign).output.isfinite().all())


def test_annotated_shapes_are_the_shapes() -> None:
    """The annotations hold for a call that is right, and see one that is not."""
    checked = jaxtyped(mesa, typechecker=beartype)
    inputs = make_inputs(1, 6, 2, 4, 3, sequences=2)
    got = checked(*inputs[:6], inputs.state, cu_seqlens=torch.tensor([0, 2, 6]), sign=torch.ones(1, 6, 2))
    assert got.output.shape == inputs.v.shape
    with pytest.raises(TypeCheckError):
        checked(inputs.q, inputs.k[:, 1:], *inputs[2:6])


@pytest.mark.parametrize("time", [1, 70])
def test_second_derivatives_are_refused_by_name(time: int) -> None:
    inputs = make_inputs(1, time, 2, 4, 3).with_grad()
    output = mesa(*inputs[:6], inputs.state).output
    with pytest.raises(RuntimeError, match=r"^mesanet\.mesa: got .*second derivatives .*, expected first"):
        torch.autograd.grad(output.sum(), inputs, create_graph=True)


@pytest.mark.parametrize("time", [1, 70])
def test_function_transforms_are_refused_by_name(time: int) -> None:
    inputs = make_inputs(1, time, 2, 4, 3)

    def loss(q: Tensor, backend: str = "auto") -> Tensor:
        return mesa(q, *inputs[1:6], inputs.state, backend=backend).output.sum()

    with pytest.raises(RuntimeError, match=r"^mesanet\.mesa: got .*torch\.func.*expected"):
        torch.func.grad(loss)(inputs.q)
    with pytest.raises(RuntimeError, match=r"^mesanet\.mesa: got .*torch\.func.*expected"):
        torch.vmap(loss)(inputs.q[None])
    marked: Inputs = inputs.with_grad()
    (expected,) = torch.autograd.grad(
        mesa(
            marked.q, *inputs[1:6], inputs.state, solver=ConjugateGradient(max_steps=500, tolerance=1e-13)
        ).output.sum(),
        marked.q,
    )
    torch.testing.assert_close(torch.func.grad(loss)(inputs.q, "reference"), expected, rtol=1e-10, atol=1e-10)
