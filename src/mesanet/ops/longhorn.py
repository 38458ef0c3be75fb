"""LongHorn's diagonal rule, as a scan over time that keeps only every 64th state.

    step_t = precision_t / (1 + precision_t k_t^T k_t)
    kv_t = (1 - k_t^2 step_t^T) * kv_{t-1} + k_t (step_t * v_t)^T        elementwise
    o_t = kv_t^T q_t

Every entry of the state forgets at its own rate, so there are no matrix products over time to be made of it. The scan
goes through a few heads at a time, so that their states stay in cache; the backward pass recomputes the states of a
chunk from its first. `ops/reference/longhorn.py` says the same with the whole history kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mesanet.ops import reference
from mesanet.ops.checks import RANGES
from mesanet.ops.chunks import ChunkLayout, chunk_layout
from mesanet.ops.derivatives import first_derivative_only
from mesanet.ops.gated import Argument, cast, check_gated, computing_dtype, zero_state
from mesanet.ops.precision import own_precision

CPU_TILE_BYTES = 1 << 20
"""Size of the states that are worked on together on a CPU: about what the second-level caches hold."""


def longhorn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    precision: Tensor,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Move the state's answer to each key towards the value, with a step for each value channel, and read it out.

    Takes q, k [B, T, H, K], v and precision (never negative) [B, T, H, V], and a state [B, H, K, V], or [S, H, K, V]
    where `cu_seqlens` [S + 1] packs S sequences end to end in a batch of one. Returns the output [B, T, H, V] and the
    last state.
    """
    gates = {"precision": Argument(precision, "B T H V", RANGES["precision"])}
    sizes = check_gated(q, k, v, gates, {"state": Argument(state, "S H K V")}, cu_seqlens, backend)
    dtype = computing_dtype(q, k, v)
    state = zero_state(sizes, dtype, q.device) if state is None else state.to(dtype)
    if backend == "reference" or (sizes.time == 1 and backend == "auto" and cu_seqlens is None):
        q_, k_, v_, precision_ = cast(dtype, q, k, v, precision)
        if backend == "reference":
            output, last = reference.longhorn(q_, k_, v_, precision_, state, cu_seqlens)
        else:
            output, last = _one_token(q_, k_, v_, precision_, state)
        return output.to(v.dtype), last
    layout = chunk_layout(sizes.batch, sizes.time, cu_seqlens)
    step = reference.longhorn_step(k.to(dtype), precision.to(dtype))
    output, last = ScannedLonghorn.apply(q, k, v, step, state, layout)  # type: ignore[no-untyped-call]
    return output, last


def _one_token(q: Tensor, k: Tensor, v: Tensor, precision: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token needs no scan: the rule as in `_advance`, but out of place.

    In the form that the reference has, (1 - k^2 step) kv, rounding to a number near one is repeated at every token, and
    over hundreds of like keys it adds up to twenty times the error of this one.
    """
    with own_precision(q.device):
        column = k.squeeze(1).unsqueeze(-1)
        step = reference.longhorn_step(k, precision).squeeze(1).unsqueeze(-2)
        error = (v.squeeze(1).unsqueeze(-2) - column * state) * column
        last = state + error * step
        return torch.einsum("bhk,bhkv->bhv", q.squeeze(1), last).unsqueeze(1), last


class ScannedLonghorn(torch.autograd.Function):
    """The scan, with the first state of every chunk kept for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, step: Tensor, state: Tensor, layout: ChunkLayout
    ) -> tuple[Tensor, Tensor]:
        """Returns the output [B, T, H, V] and the states after the last token."""
        with own_precision(q.device):
            query, key, value, rate = (_by_token(tensor, layout, state.dtype) for tensor in (q, k, v, step))
            output = torch.empty_like(value)
            last = state.clone(memory_format=torch.contiguous_format)
            states = state.new_empty(layout.chunks, value.shape[2], *state.shape[2:])
            for tile in _tiles(state, value.shape[2]):
                for chunk, segment in layout.forwards():
                    if chunk == segment.begin:
                        carried = state[segment.sequences].flatten(0, 1)[tile].clone()
                    states[chunk, tile] = carried
                    for t in range(layout.chunk):
                        _advance(carried, key[chunk, t, tile], value[chunk, t, tile], rate[chunk, t, tile])
                        output[chunk, t, tile] = torch.bmm(query[chunk, t, tile].unsqueeze(1), carried).squeeze(1)
                    if chunk + 1 == segment.end:
                        last[segment.sequences].view(-1, *state.shape[2:])[tile] = carried
            ctx.save_for_backward(q, k, v, step, state, states)
            ctx.layout = layout
            return _from_token(output, layout, q.shape[2], v.dtype), last

    @staticmethod
    @first_derivative_only("mesanet.ops.longhorn")
    def backward(ctx: Any, grad_output: Tensor, grad_last: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for q, k, v, the steps and the initial state."""
        q, k, v, step, state, states = ctx.saved_tensors
        layout: ChunkLayout = ctx.layout
        with own_precision(q.device):
            tokens = [_by_token(tensor, layout, state.dtype) for tensor in (q, k, v, step, grad_output)]
            grads = [torch.empty_like(tensor) for tensor in tokens[:4]]
            grad_state = grad_last.contiguous().clone()
            for tile in _tiles(state, states.shape[1]):
                for chunk, segment in layout.backwards():
                    if chunk + 1 == segment.end:
                        carried = grad_last[segment.sequences].flatten(0, 1)[tile].clone()
                    parts = _spread(carried, states[chunk, tile], [tensor[chunk, :, tile] for tensor in tokens])
                    for grad, part in zip(grads, parts, strict=True):
                        grad[chunk, :, tile] = part
                    if chunk == segment.begin:
                        grad_state[segment.sequences].view(-1, *state.shape[2:])[tile] = carried
            merged = [
                _from_token(grad, layout, q.shape[2], tensor.dtype)
                for grad, tensor in zip(grads, (q, k, v, step), strict=True)
            ]
        return *merged, grad_state, None


def _by_token(tensor: Tensor, layout: ChunkLayout, dtype: torch.dtype) -> Tensor:
    """[B, T, H, X] -> [N, C, P, X] with the P = R * H problems of one token side by side."""
    return layout.split(tensor, dtype).permute(2, 3, 0, 1, 4).flatten(2, 3).contiguous()


def _from_token(tensor: Tensor, layout: ChunkLayout, heads: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `_by_token`."""
    chunks, chunk, _, size = tensor.shape
    return layout.merge(tensor.view(chunks, chunk, layout.batch, heads, size).permute(2, 3, 0, 1, 4), dtype)


def _tiles(state: Tensor, problems: int) -> Iterator[slice]:
    """Runs of problems whose states stay in cache together."""
    count = problems
    if state.device.type == "cpu":
        count = max(1, CPU_TILE_BYTES // max(1, state.shape[2] * state.shape[3] * state.element_size()))
    for begin in range(0, problems, max(1, count)):
        yield slice(begin, min(begin + count, problems))


def _advance(kv: Tensor, key: Tensor, value: Tensor, rate: Tensor) -> None:
    """One step of the rule on states [n, K, V], in place: kv + (k step^T) * (v - k * kv)."""
    column = key.unsqueeze(-1)
    error = torch.addcmul(value.unsqueeze(1), column, kv, value=-1).mul_(column)
    kv.addcmul_(error, rate.unsqueeze(1))


def _spread(carried: Tensor, first: Tensor, tokens: list[Tensor]) -> tuple[Tensor, ...]:
    """Gradients of q, k, v and the steps [C, n, ...] of one chunk; `carried` moves from its end to its start.

    `carried` [n, K, V] is the gradient for the state after the chunk, `first` the state before it, and `tokens` are
    q, k, v, the steps and the gradient for the output.
    """
    query, key, value, rate, error = tokens
    chunk = len(key)
    states = first.new_empty(chunk + 1, *first.shape)
    states[0] = first
    for t in range(chunk):
        states[t + 1] = states[t]
        _advance(states[t + 1], key[t], value[t], rate[t])
    grads = [torch.empty(tensor.shape, dtype=first.dtype, device=first.device) for tensor in (query, key, value, rate)]
    grad_query, grad_key, grad_value, grad_rate = grads
    for t in reversed(range(chunk)):
        key_row, key_column, rate_row = key[t].unsqueeze(1), key[t].unsqueeze(-1), rate[t].unsqueeze(1)
        grad_query[t] = torch.bmm(states[t + 1], error[t].unsqueeze(-1)).squeeze(-1)
        carried.addcmul_(query[t].unsqueeze(-1), error[t].unsqueeze(1))
        from_key = torch.bmm(key_row, carried).squeeze(1)
        overlap = carried * states[t]
        shrunk = torch.bmm(overlap, rate_row.mT).squeeze(-1)
        grad_key[t] = torch.bmm(carried, (rate[t] * value[t]).unsqueeze(-1)).squeeze(-1) - 2 * key[t] * shrunk
        grad_value[t] = rate[t] * from_key
        grad_rate[t] = value[t] * from_key - torch.bmm(key_row.square(), overlap).squeeze(1)
        carried.sub_((carried * rate_row).mul_(key_column.square()))
    return tuple(grads)
