"""mLSTM in parallel over time: linear attention with exponential input gates, a normaliser and a stabiliser.

    m_t = max(log_forget_t + m_{t-1}, log_input_t)
    kv_t = exp(log_forget_t + m_{t-1} - m_t) kv_{t-1} + exp(log_input_t - m_t) k_t v_t^T
    n_t  = exp(log_forget_t + m_{t-1} - m_t) n_{t-1}  + exp(log_input_t - m_t) k_t
    o_t = kv_t^T q_t / (max(|n_t^T q_t|, exp(-m_t)) + epsilon)

Once the stabiliser m is known, this is gated linear attention with a log decay that is never positive and a write gate
that is never above one, on values with a further channel of ones for the normaliser. `ops/reference/linear.py` says the
same one token at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mesanet.ops import reference
from mesanet.ops.checks import RANGES
from mesanet.ops.derivatives import first_derivative_only
from mesanet.ops.gated import Argument, cast, check_gated, computing_dtype, sequence_bounds, zero_state
from mesanet.ops.linear_attention import normalised_linear_attention
from mesanet.ops.reference.linear import STABILISER_FLOOR
from mesanet.ops.state import MlstmState

CPU_BLOCK = 64
"""Tokens that are scaled at once on a CPU."""


def mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_forget: Tensor,
    log_input: Tensor,
    state: MlstmState | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
    epsilon: float = 1e-6,
) -> tuple[Tensor, MlstmState]:
    """Read a decayed, exponentially weighted average of values with the query at every token.

    Takes q, k [B, T, H, K], v [B, T, H, V], log_forget (never positive) and log_input (any size) [B, T, H], and a
    state of B rows, or of S rows where `cu_seqlens` [S + 1] packs S sequences end to end in a batch of one. The queries
    are used as they come: xLSTM's factor K^-1/2 is the caller's. Returns the output [B, T, H, V] and the last state.
    """
    gates = {
        "log_forget": Argument(log_forget, "B T H", RANGES["log_decay"]),
        "log_input": Argument(log_input, "B T H", RANGES["log_input"]),
    }
    sizes = check_gated(q, k, v, gates, _arguments(state), cu_seqlens, backend)
    dtype = computing_dtype(q, k, v)
    if state is None:
        kv = zero_state(sizes, dtype, q.device)
        state = MlstmState(kv, kv.new_zeros(kv.shape[:3]), kv.new_zeros(kv.shape[:2]))
    state = MlstmState(state.kv.to(dtype), state.normaliser.to(dtype), state.stabiliser.to(dtype))
    # One token at a time has nothing to do in parallel.
    if backend == "reference" or (sizes.time == 1 and backend == "auto"):
        q_, k_, v_, forget_, input_ = cast(dtype, q, k, v, log_forget, log_input)
        output, after = reference.mlstm(q_, k_, v_, forget_, input_, state, cu_seqlens, epsilon)
        return output.to(v.dtype), after
    if sizes.time == 0:
        return v.clone(), state
    stabiliser, last, log_decay, write = stabilise(log_forget, log_input, state.stabiliser, cu_seqlens)
    sums = torch.cat([state.kv, state.normaliser.unsqueeze(-1)], dim=-1)
    numerator, overlap, sums = normalised_linear_attention(
        q, k, v, log_decay.to(dtype), write.to(dtype), sums, cu_seqlens
    )
    # Numerator and denominator both times exp(min(m, 0)), without which exp(-m) could overflow.
    scale, least = torch.exp(stabiliser.clamp(max=0)).to(dtype), torch.exp(-stabiliser.clamp(min=0)).to(dtype)
    factor = scale / (torch.maximum(overlap.abs() * scale, least) + epsilon * scale)
    output = ScaledTokens.apply(numerator, factor, v.dtype)  # type: ignore[no-untyped-call]
    return output, MlstmState(sums[..., :-1], sums[..., -1], last.to(dtype))


class ScaledTokens(torch.autograd.Function):
    """tensor [B, T, H, V] times factor [B, T, H], a block of tokens at a time, so that products stay in cache."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the product in this dtype."""
        ctx.save_for_backward(tensor, factor)
        product = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
        for block in _blocks(tensor):
            product[:, block] = tensor[:, block] * factor[:, block].unsqueeze(-1)
        return product

    @staticmethod
    @first_derivative_only("mesanet.ops.mlstm")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Gradients for tensor and factor."""
        tensor, factor = ctx.saved_tensors
        grad_tensor, grad_factor = torch.empty_like(tensor), torch.empty_like(factor)
        for block in _blocks(tensor):
            arrived = grad[:, block].to(tensor.dtype)
            grad_tensor[:, block] = arrived * factor[:, block].unsqueeze(-1)
            grad_factor[:, block] = (arrived * tensor[:, block]).sum(-1)
        return grad_tensor, grad_factor, None


def _blocks(tensor: Tensor) -> Iterator[slice]:
    """Runs of tokens of [B, T, ...]: all of them at once but on a CPU."""
    length = tensor.shape[1]
    size = CPU_BLOCK if tensor.device.type == "cpu" else max(1, length)
    for begin in range(0, length, size):
        yield slice(begin, begin + size)


def _arguments(state: MlstmState | None) -> dict[str, Argument]:
    if state is None:
        return {}
    if not isinstance(state, MlstmState):
        raise ValueError(f"state: got {type(state).__name__}, expected an MlstmState")
    shapes = ("S H K V", "S H K", "S H")
    return {
        f"state.{name}": Argument(part, shape) for name, part, shape in zip(state._fields, state, shapes, strict=True)
    }


class Stabilised(NamedTuple):
    """The stabiliser, and the gates that are left when it is taken out of them; all float64."""

    stabiliser: Tensor
    """[B, T, H]"""
    last: Tensor
    """[S, H] after the last token of each sequence."""
    log_decay: Tensor
    """[B, T, H]"""
    write: Tensor
    """[B, T, H]"""


def stabilise(log_forget: Tensor, log_input: Tensor, initial: Tensor, cu_seqlens: Tensor | None) -> Stabilised:
    """Run the stabiliser over every sequence from its value in `initial` [S, H], in about log2(T) steps.

    In float64, because the log decays are differences of stabilisers, and their rounding errors would add up.
    """
    forget, gate, initial = cast(torch.float64, log_forget, log_input, initial)
    begins, ends = sequence_bounds(forget, cu_seqlens)
    filled = begins < ends
    first = begins[filled]
    before = initial.unsqueeze(1) if cu_seqlens is None else initial[filled].unsqueeze(0)
    # The first token of a sequence forgets all before it, and starts from the given stabiliser instead.
    start = torch.maximum(forget[:, first] + before, gate[:, first])
    sums = forget.index_fill(1, first, -torch.inf)
    running = gate.index_copy(1, first, start).clamp(min=STABILISER_FLOOR)
    span = 1
    while span < forget.shape[1]:
        # `sums` and `running` cover the last `span` tokens; join them with what covers the `span` tokens before.
        reached = torch.maximum(running[:, span:], sums[:, span:] + running[:, :-span])
        running = torch.cat([running[:, :span], reached], dim=1)
        sums = torch.cat([sums[:, :span], sums[:, span:] + sums[:, :-span]], dim=1)
        span *= 2
    previous = torch.cat([torch.zeros_like(running[:, :1]), running[:, :-1]], dim=1).index_copy(1, first, before)
    if cu_seqlens is None:
        last = running[:, -1]
    else:
        last = initial.index_copy(0, filled.nonzero()[:, 0], running[0, ends[filled] - 1])
    return Stabilised(running, last, forget + previous - running, torch.exp(gate - running))
