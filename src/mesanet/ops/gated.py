"""What the gated ops share: checks of their arguments, and the dtype that they compute in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from mesanet.ops.checks import Range, Sizes, check_backend, check_cu_seqlens, check_like, check_shape, check_values


class Argument(NamedTuple):
    """A gate or a state, the shape that it must have, and which numbers; no tensor where the caller left it out."""

    tensor: Tensor | None
    shape: str
    range: Range | None = None


def check_gated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Mapping[str, Argument],
    states: Mapping[str, Argument],
    cu_seqlens: Tensor | None,
    backend: str,
) -> Sizes:
    """Everything that can be wrong with the arguments of a gated op; in shapes S is the number of sequences."""
    check_backend(backend)
    check_shape("q", q, "B T H K")
    batch, time, heads, key = q.shape
    known = {"B": batch, "T": time, "H": heads, "K": key}
    check_shape("k", k, "B T H K", **known)
    check_shape("v", v, "B T H V", **known)
    known["V"] = v.shape[-1]
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_like(name, tensor, q.device)
    known["S"] = check_cu_seqlens(cu_seqlens, batch, time, q.device)
    check_arguments(gates, known, q.device)
    check_arguments(states, known, q.device)
    check_states(states)
    check_ranges(gates)
    return Sizes(batch, time, heads, key, known["V"], known["S"])


def check_arguments(arguments: Mapping[str, Argument], known: Mapping[str, int], device: torch.device) -> None:
    """Refuse tensors of another shape, another device, or without real floating point numbers."""
    for name, (tensor, shape, _) in arguments.items():
        if tensor is not None:
            check_shape(name, tensor, shape, **known)
            check_like(name, tensor, device)


def check_ranges(gates: Mapping[str, Argument]) -> None:
    """Refuse gates out of their range, or not a number."""
    given = {
        name: (gate.tensor, gate.range)
        for name, gate in gates.items()
        if gate.tensor is not None and gate.range is not None
    }
    check_values(given)


def check_states(states: Mapping[str, Argument]) -> None:
    """Refuse states of 16 bits, which lose what many small steps add."""
    for name, (tensor, _, _) in states.items():
        if tensor is not None and tensor.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{name}: got dtype {tensor.dtype}, expected float32 or float64: 16 bits lose the state")


def computing_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype of states and of everything computed: float64 where any of the tensors is, else float32."""
    double = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if double else torch.float32


def zero_state(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[S, H, K, V] of zeros."""
    return torch.zeros(sizes.sequences, sizes.heads, sizes.key, sizes.value, dtype=dtype, device=device)


def cast(dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
    """All the tensors in one dtype."""
    return tuple(tensor.to(dtype) for tensor in tensors)


def sequence_bounds(tensor: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where the sequences of each row of [B, T, ...] begin and end, one after the other."""
    if cu_seqlens is not None:
        return cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    bounds = torch.tensor([0, tensor.shape[1]], device=tensor.device)
    return bounds[:1], bounds[1:]
