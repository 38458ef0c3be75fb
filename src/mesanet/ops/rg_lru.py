"""The real-gated linear recurrent unit of Griffin and RecurrentGemma, as a scan over time.

    h_t = a_t h_{t-1} + sqrt(1 - a_t^2) x_t        a_t = exp(log_decay_t)

On a CPU the scan goes through time in one go, a block at a time so that a block stays in cache. Elsewhere all spans of
a block are scanned side by side, and joined with products of gates that are exponentials of sums of their logarithms:
nothing is ever divided, so nothing can overflow. `ops/reference/rg_lru.py` says the same one token at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mesanet.ops import reference
from mesanet.ops.checks import RANGES, check_backend, check_cu_seqlens, check_shape
from mesanet.ops.derivatives import first_derivative_only
from mesanet.ops.gated import Argument, check_arguments, check_ranges, check_states, computing_dtype
from mesanet.ops.reference.rg_lru import STEEPEST_ROOT

CPU_BLOCK = 64
"""Tokens that a block has on a CPU."""
SPAN = 64
"""Tokens that are scanned one after the other where spans are scanned side by side."""


def rg_lru(
    x: Tensor,
    log_decay: Tensor,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over x [B, T, D] with gates log_decay [B, T, D], channel by channel.

    Takes a state [B, D], or [S, D] where `cu_seqlens` [S + 1] packs S sequences end to end in a batch of one. Returns
    the output [B, T, D] and the last state. A log_decay of minus infinity makes h_t = x_t, which is how RecurrentGemma
    treats the first token of a document.
    """
    check_backend(backend)
    check_shape("x", x, "B T D")
    batch, time, width = x.shape
    known = {"B": batch, "T": time, "D": width, "S": check_cu_seqlens(cu_seqlens, batch, time, x.device)}
    gates = {"log_decay": Argument(log_decay, "B T D", RANGES["log_decay"])}
    check_arguments({"x": Argument(x, "B T D"), **gates}, known, x.device)
    check_arguments({"state": Argument(state, "S D")}, known, x.device)
    check_states({"state": Argument(state, "S D")})
    check_ranges(gates)
    dtype = computing_dtype(x)
    state = x.new_zeros(known["S"], width, dtype=dtype) if state is None else state.to(dtype)
    # One token at a time has nothing to do in parallel.
    if backend == "reference" or (time == 1 and backend == "auto"):
        output, last = reference.rg_lru(x.to(dtype), log_decay.to(dtype), state, cu_seqlens)
        return output.to(x.dtype), last
    side_by_side = x.device.type != "cpu"
    plan = Plan.of(time, cu_seqlens, time if side_by_side else CPU_BLOCK, SPAN if side_by_side else None)
    output, last = ScannedLru.apply(x, log_decay, state, plan)  # type: ignore[no-untyped-call]
    return output, last


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where sequences begin and end, and how time is cut."""

    bounds: tuple[tuple[int, int], ...]
    """First and one past the last token of every sequence of a row."""
    blocks: tuple[slice, ...]
    """Runs of tokens that are worked on at once."""
    span: int | None
    """Tokens that are scanned one after the other; none is all of a block."""

    @staticmethod
    def of(time: int, cu_seqlens: Tensor | None, block: int, span: int | None) -> Plan:
        """Blocks of `block` tokens over the given sequences, or over one sequence per row."""
        edges = [0, time] if cu_seqlens is None else cu_seqlens.tolist()
        bounds = tuple((int(begin), int(end)) for begin, end in pairwise(edges))
        blocks = tuple(slice(begin, min(begin + block, time)) for begin in range(0, time, max(block, 1)))
        return Plan(bounds=bounds, blocks=blocks, span=span)

    def begins(self, block: slice) -> tuple[list[int], list[int]]:
        """Which sequences begin in a block, and at which of its tokens."""
        found = [
            (row, begin - block.start)
            for row, (begin, end) in enumerate(self.bounds)
            if begin < end and block.start <= begin < block.stop
        ]
        return [row for row, _ in found], [place for _, place in found]

    def ends(self, block: slice) -> tuple[list[int], list[int]]:
        """Which sequences end in a block, and at which of its tokens."""
        found = [
            (row, end - 1 - block.start)
            for row, (begin, end) in enumerate(self.bounds)
            if begin < end and block.start <= end - 1 < block.stop
        ]
        return [row for row, _ in found], [place for _, place in found]


class ScannedLru(torch.autograd.Function):
    """The recurrence and its gradient, each as a scan."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log_decay: Tensor, state: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        """Returns the output [B, T, D] and the state after the last token."""
        dtype = state.dtype
        hidden = torch.empty(x.shape, dtype=dtype, device=x.device)
        starts = _by_row(state, plan)
        last = starts.clone()
        for block in plan.blocks:
            logs = log_decay[:, block].to(dtype)
            decay = logs.exp()
            update = torch.expm1(2 * logs).neg_().sqrt_().mul_(x[:, block])
            rows, places = plan.begins(block)
            if block.start > 0:
                decay_first = decay[:, 0].clone()
                if 0 in places:
                    decay_first.zero_()
                update[:, 0].addcmul_(decay_first, hidden[:, block.start - 1])
            if rows:
                update[:, places] += decay[:, places] * starts[:, rows]
                decay[:, places] = 0
            hidden[:, block] = scan(update, decay, plan.span)
            rows, places = plan.ends(block)
            if rows:
                last[:, rows] = hidden[:, block][:, places]
        output = hidden.to(x.dtype)
        ctx.save_for_backward(x, log_decay, state, hidden)
        ctx.plan = plan
        return output, last.view(state.shape)

    @staticmethod
    @first_derivative_only("mesanet.ops.rg_lru")
    def backward(ctx: Any, grad_output: Tensor, grad_last: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for x, log_decay and the initial state."""
        x, log_decay, state, hidden = ctx.saved_tensors
        plan: Plan = ctx.plan
        dtype = state.dtype
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        grad_decay = torch.empty_like(log_decay, memory_format=torch.contiguous_format)
        starts, from_last = _by_row(state, plan), _by_row(grad_last, plan)
        grad_starts = from_last.clone()
        carried = torch.zeros_like(starts[:, 0])
        for block in reversed(plan.blocks):
            logs = log_decay[:, block].to(dtype)
            decay = logs.exp()
            error = grad_output[:, block].to(dtype, copy=True)
            rows, places = plan.ends(block)
            if rows:
                error[:, places] += from_last[:, rows]
            error[:, -1] += carried
            rows, places = plan.begins(block)
            within = decay.clone() if rows else decay
            if rows:
                within[:, places] = 0
            error = scan_back(error, within, plan.span)
            carried = within[:, 0] * error[:, 0]
            before = torch.empty_like(error)
            before[:, 1:] = hidden[:, block][:, :-1]
            before[:, 0] = hidden[:, block.start - 1] if block.start > 0 else 0
            if rows:
                before[:, places] = starts[:, rows]
                grad_starts[:, rows] = decay[:, places] * error[:, places]
            square = torch.expm1(2 * logs).neg_()
            scale = square.sqrt()
            # d sqrt(1 - a^2) / d log a = -a^2 / sqrt(1 - a^2), with the slope of the root bounded.
            slope = 0.5 / scale.clamp(min=0.5 / STEEPEST_ROOT)
            grad_x[:, block] = error * scale
            through_scale = slope.mul_(decay).mul_(-2).mul_(x[:, block])
            grad_decay[:, block] = before.add_(through_scale).mul_(decay).mul_(error)
        return grad_x, grad_decay, grad_starts.view(state.shape), None


def _by_row(state: Tensor, plan: Plan) -> Tensor:
    """[S, D] as [B, sequences of a row, D]."""
    return state.view(state.shape[0] // len(plan.bounds), len(plan.bounds), state.shape[1])


def scan(update: Tensor, decay: Tensor, span: int | None) -> Tensor:
    """h_t = decay_t h_{t-1} + update_t over [B, T, D], in place of `update`, from nothing."""
    if span is None or update.shape[1] <= span:
        for t in range(1, update.shape[1]):
            update[:, t].addcmul_(decay[:, t], update[:, t - 1])
        return update
    time = update.shape[1]
    padding = -time % span
    update = torch.nn.functional.pad(update, (0, 0, 0, padding)).unflatten(1, (-1, span))
    decay = torch.nn.functional.pad(decay, (0, 0, 0, padding)).unflatten(1, (-1, span))
    for t in range(1, span):
        update[:, :, t].addcmul_(decay[:, :, t], update[:, :, t - 1])
    kept = decay.log().cumsum(dim=2).exp_()
    for n in range(1, update.shape[1]):
        update[:, n].addcmul_(kept[:, n], update[:, n - 1, -1:])
    return update.flatten(1, 2)[:, :time]


def scan_back(error: Tensor, decay: Tensor, span: int | None) -> Tensor:
    """e_t = error_t + decay_{t+1} e_{t+1} over [B, T, D], possibly in place of `error`, from nothing."""
    if span is None or error.shape[1] <= span:
        for t in reversed(range(error.shape[1] - 1)):
            error[:, t].addcmul_(decay[:, t + 1], error[:, t + 1])
        return error
    later = torch.cat([decay[:, 1:], torch.zeros_like(decay[:, :1])], dim=1)
    return scan(error.flip(1), later.flip(1), span).flip(1)
