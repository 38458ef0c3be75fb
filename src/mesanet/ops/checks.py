"""Checks of what the ops are given: every complaint names the argument, what came, and what was expected."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from mesanet.ops.solver import ConjugateGradient
from mesanet.ops.state import MesaState

FLOAT32 = torch.finfo(torch.float32)
BACKENDS = ("auto", "chunked", "reference")


class Range(NamedTuple):
    """Which numbers an argument may hold."""

    holds: Callable[[float, float], bool]
    """Whether all are allowed, from the least and the largest, which are NaN if any is."""
    description: str


RANGES = {
    "log_decay": Range(lambda least, largest: largest <= 0, "at most 0, the logarithm of a gate in [0, 1]"),
    "write": Range(lambda least, largest: 0 <= least <= largest <= 1, "numbers in [0, 1]"),
    "ridge": Range(
        lambda least, largest: FLOAT32.tiny <= least <= largest <= FLOAT32.max, "positive finite numbers in float32"
    ),
    "free": Range(lambda least, largest: -math.inf < least <= largest < math.inf, "finite numbers"),
    "precision": Range(lambda least, largest: 0 <= least <= largest < math.inf, "finite numbers of at least 0"),
    "log_input": Range(lambda least, largest: largest < math.inf, "the logarithm of a finite gate"),
    "sign": Range(lambda least, largest: least == largest == 1, "+1 or -1 everywhere"),
}
"""The ranges of the arguments of the ops; for the sign, of its absolute value."""


class Sizes(NamedTuple):
    """The sizes that the arguments of an op agree on."""

    batch: int
    time: int
    heads: int
    key: int
    value: int
    sequences: int


def check_shape(name: str, tensor: object, expected: str, **sizes: int) -> None:
    """Refuse anything but a tensor of the shape that `expected` spells; `check_shape("k", k, "B T", B=2)`."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name}: got {type(tensor).__name__}, expected a tensor [{expected.replace(' ', ', ')}]")
    letters = expected.split()
    wanted = tuple(sizes.get(letter) for letter in letters)
    fits = len(tensor.shape) == len(wanted) and all(
        want is None or got == want for got, want in zip(tensor.shape, wanted, strict=True)
    )
    if not fits:
        known = ", ".join(f"{letter}={sizes[letter]}" for letter in letters if letter in sizes)
        where = f" with {known}" if known else ""
        raise ValueError(f"{name}: got shape {list(tensor.shape)}, expected [{', '.join(letters)}]{where}")


def check_like(name: str, tensor: Tensor, device: torch.device) -> None:
    """Refuse a tensor on another device, or one that holds no real floating point numbers."""
    if not tensor.is_floating_point():
        raise ValueError(f"{name}: got dtype {tensor.dtype}, expected a floating point dtype")
    if tensor.device != device:
        raise ValueError(f"{name}: got device {tensor.device}, expected {device}, where q is")


def check_cu_seqlens(cu_seqlens: Tensor | None, batch: int, time: int, device: torch.device) -> int:
    """How many sequences there are; refuses bounds that do not cut [0, T] into pieces."""
    if cu_seqlens is None:
        return batch
    check_shape("cu_seqlens", cu_seqlens, "S+1")
    if cu_seqlens.is_floating_point() or cu_seqlens.dtype == torch.bool:
        raise ValueError(f"cu_seqlens: got dtype {cu_seqlens.dtype}, expected an integer dtype")
    if batch != 1:
        raise ValueError(f"cu_seqlens: got a batch of {batch}, expected B = 1 with the sequences packed end to end")
    if cu_seqlens.device != device:
        raise ValueError(f"cu_seqlens: got device {cu_seqlens.device}, expected {device}, where q is")
    bounds = cu_seqlens.tolist()
    if not bounds or bounds[0] != 0 or bounds[-1] != time or bounds != sorted(bounds):
        raise ValueError(f"cu_seqlens: got {bounds}, expected bounds that rise from 0 to T={time}")
    return len(bounds) - 1


def check_backend(backend: str) -> None:
    """Refuse a backend that there is none of."""
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, expected one of {', '.join(BACKENDS)}")


def check_mesa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    write: Tensor,
    ridge: Tensor,
    state: MesaState | None,
    solver: ConjugateGradient,
    cu_seqlens: Tensor | None,
    backend: str,
    sign: Tensor | None,
) -> Sizes:
    """Everything that can be wrong with the arguments of `mesa`, but for numbers in the large tensors."""
    check_backend(backend)
    if not isinstance(solver, ConjugateGradient):
        raise ValueError(f"solver: got {type(solver).__name__}, expected a ConjugateGradient")
    check_shape("q", q, "B T H K")
    batch, time, heads, key = q.shape
    if key == 0:
        raise ValueError(f"q: got shape {list(q.shape)}, expected [B, T, H, K] with K of at least 1")
    known = {"B": batch, "T": time, "H": heads, "K": key}
    check_shape("k", k, "B T H K", **known)
    check_shape("v", v, "B T H V", **known)
    known["V"] = v.shape[-1]
    gates = {"log_decay": log_decay, "write": write}
    if sign is not None:
        gates["sign"] = sign
    for name, gate in gates.items():
        check_shape(name, gate, "B T H", **known)
    check_shape("ridge", ridge, "H K", **known)
    for name, tensor in {"q": q, "k": k, "v": v, "ridge": ridge, **gates}.items():
        check_like(name, tensor, q.device)
    check_values({name: (tensor, RANGES[name]) for name, tensor in {"ridge": ridge, **gates}.items()})
    known["S"] = check_cu_seqlens(cu_seqlens, batch, time, q.device)
    if state is not None:
        _check_mesa_state(state, known, q.device)
    return Sizes(batch, time, heads, key, known["V"], known["S"])


def check_values(tensors: Mapping[str, tuple[Tensor, Range]]) -> None:
    """Refuse gates and ridges out of their range, or not a number; on a GPU all the answers come in one transfer."""
    filled = {name: tensor.detach() for name, (tensor, _) in tensors.items() if tensor.numel()}
    if not filled:
        return
    extremes = [extreme for name, tensor in filled.items() for extreme in _of_interest(name, tensor).aminmax()]
    values = iter(torch.stack(extremes).tolist())
    for name in filled:
        least, largest = next(values), next(values)
        allowed = tensors[name][1]
        if not allowed.holds(least, largest):
            raise ValueError(f"{name}: got values from {least} to {largest}, expected {allowed.description}")


def _of_interest(name: str, tensor: Tensor) -> Tensor:
    return tensor.abs() if name == "sign" else tensor


def _check_mesa_state(state: MesaState, known: dict[str, int], device: torch.device) -> None:
    if not isinstance(state, MesaState):
        raise ValueError(f"state: got {type(state).__name__}, expected a MesaState")
    for name, tensor, shape in (("state.kk", state.kk, "S H K K"), ("state.kv", state.kv, "S H K V")):
        check_shape(name, tensor, shape, **known)
        check_like(name, tensor, device)
        if tensor.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{name}: got dtype {tensor.dtype}, expected float32 or float64: 16 bits lose the state")
