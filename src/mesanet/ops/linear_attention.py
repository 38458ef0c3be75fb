"""Gated linear attention in parallel over time: GLA with decay and write gates, Mamba2's recurrence with decay alone.

    kv_t = gamma_t kv_{t-1} + write_t k_t v_t^T
    o_t = kv_t^T q_t

Within a chunk, o = (zeta * q k^T) v, where zeta_ts is the product of the gates after s up to t; what came before
the chunk is read from its state. `ops/reference/linear.py` says the same one token at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mesanet.ops import reference
from mesanet.ops.blocks import Block, BlockGates, ChunkGates, Tokens, Walk, crossing
from mesanet.ops.checks import RANGES
from mesanet.ops.chunks import ChunkLayout, chunk_layout
from mesanet.ops.derivatives import first_derivative_only
from mesanet.ops.gated import Argument, cast, check_gated, computing_dtype, zero_state
from mesanet.ops.precision import own_precision


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    write: Tensor | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
    sign: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Read a decayed sum of write * k v^T with the query at every token.

    Takes q, k [B, T, H, K], v [B, T, H, V], log_decay and write [B, T, H] (no write gate is a gate of one), and a state
    [B, H, K, V], or [S, H, K, V] where `cu_seqlens` [S + 1] packs S sequences end to end in a batch of one. `sign`
    [B, T, H] of +1 and -1 makes forget gates negative. Returns the output [B, T, H, V] and the last state.
    """
    given = {"log_decay": log_decay, "write": write, "sign": sign}
    gates = {name: Argument(gate, "B T H", RANGES[name]) for name, gate in given.items()}
    sizes = check_gated(q, k, v, gates, {"state": Argument(state, "S H K V")}, cu_seqlens, backend)
    dtype = computing_dtype(q, k, v)
    state = zero_state(sizes, dtype, q.device) if state is None else state.to(dtype)
    # One token at a time has nothing to do in parallel.
    if backend == "reference" or (sizes.time == 1 and backend == "auto"):
        q_, k_, v_, decay_ = cast(dtype, q, k, v, log_decay)
        write_ = None if write is None else write.to(dtype)
        output, last = reference.gated_linear_attention(q_, k_, v_, decay_, write_, state, cu_seqlens, sign)
        return output.to(v.dtype), last
    layout = chunk_layout(sizes.batch, sizes.time, cu_seqlens)
    output, _, last = ChunkedLinearAttention.apply(q, k, v, log_decay, write, state, sign, layout, False)  # type: ignore[no-untyped-call]
    return output, last


def normalised_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, write: Tensor, state: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The same on values with a further channel of ones, which comes back apart, as what the output is divided by.

    The state [S, H, K, V + 1] has that channel. Returns the output [B, T, H, V], the sums of the weights
    [B, T, H], and the last state, all in the dtype of the state.
    """
    layout = chunk_layout(q.shape[0], q.shape[1], cu_seqlens)
    output, sums, last = ChunkedLinearAttention.apply(q, k, v, log_decay, write, state, None, layout, True)  # type: ignore[no-untyped-call]
    return output, sums, last


class ChunkedLinearAttention(torch.autograd.Function):
    """The rule chunk by chunk; the backward pass reads the states that the forward pass has kept."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        write: Tensor | None,
        state: Tensor,
        sign: Tensor | None,
        layout: ChunkLayout,
        normalised: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the output [B, T, H, V], that of a further channel of ones [B, T, H], and the states at the end.

        The channel of ones exists only if it is `normalised`, and only in a block of the values at a time.
        """
        with own_precision(q.device):
            walk = Walk.plan(layout, q, state.dtype)
            gates = ChunkGates.split(walk, log_decay, write, sign)
            channels = v.shape[-1]
            states = walk.states(q.shape[-1], state.shape[-1], q.device)
            # What is still to be divided is not rounded to 16 bits.
            output = torch.empty(v.shape, dtype=walk.dtype if normalised else v.dtype, device=v.device)
            last = state.clone()
            sums = torch.empty_like(gates.log_decay) if normalised else None
            for block in walk.blocks:
                query, key, value = (walk.load(tensor, block) for tensor in (q, k, v))
                if normalised:
                    value = append_channel(value, value.new_ones(()).expand(value.shape[:2]))
                rows = walk.rows(block)
                part = gates.block(rows)
                if block.first:
                    carried = state[block.sequences].flatten(0, 1).clone()
                carried = _carry(walk, block, part, key, value, carried, states[rows])
                read = _read(part, query, key, value, states[rows])
                walk.store(output, read[..., :channels], block)
                if sums is not None:
                    sums[rows] = read[..., channels]
                if block.last:
                    last[block.sequences] = carried.view_as(last[block.sequences])
            ctx.save_for_backward(q, k, v, log_decay, write, sign, states)
            ctx.walk, ctx.normalised = walk, normalised
            merged = state.new_empty(0) if sums is None else walk.merge(sums, state.dtype)
            return output, merged, last

    @staticmethod
    @first_derivative_only("mesanet.ops.gated_linear_attention and mlstm")
    def backward(ctx: Any, grad_output: Tensor, grad_sums: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for the six tensors of `forward`."""
        q, k, v, log_decay, write, sign, states = ctx.saved_tensors
        walk: Walk = ctx.walk
        channels = v.shape[-1]
        with own_precision(q.device):
            gates = ChunkGates.split(walk, log_decay, write, sign)
            grads = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (q, k, v)]
            grad_decay, grad_write = torch.empty_like(gates.log_decay), torch.empty_like(gates.log_decay)
            grad_initial = grad_state.clone()
            split_sums = walk.split(grad_sums) if ctx.normalised else None
            for block in reversed(walk.blocks):
                tokens = Tokens(*(walk.load(tensor, block) for tensor in (q, k, v, grad_output)))
                rows = walk.rows(block)
                if split_sums is not None:
                    ones = tokens.value.new_ones(()).expand(tokens.value.shape[:2])
                    value, error = append_channel(tokens.value, ones), append_channel(tokens.error, split_sums[rows])
                    tokens = tokens._replace(value=value, error=error)
                part = gates.block(rows)
                if block.last:
                    carried = grad_state[block.sequences].flatten(0, 1).clone()
                arrived, carried = _carry_back(walk, block, part, tokens, carried)
                *token_grads, grad_decay[rows], grad_write[rows] = _spread(tokens, part, states[rows], arrived)
                token_grads[2] = token_grads[2][..., :channels]
                for target, grad in zip(grads, token_grads, strict=True):
                    walk.store(target, grad, block)
                if block.first:
                    grad_initial[block.sequences] = carried.view_as(grad_initial[block.sequences])
            merged = [
                None if gate is None else walk.merge(grad, gate.dtype)
                for grad, gate in ((grad_decay, log_decay), (grad_write, write))
            ]
        return *grads, *merged, grad_initial, None, None, None


def append_channel(tensor: Tensor, channel: Tensor) -> Tensor:
    """[n, C, V] and [n, C] -> [n, C, V + 1]"""
    return torch.cat([tensor, channel.unsqueeze(-1)], dim=-1)


def _carry(
    walk: Walk, block: Block, gates: BlockGates, key: Tensor, value: Tensor, carried: Tensor, states: Tensor
) -> Tensor:
    """Write the state [K, V] at the start of each chunk of a block into `states`; return the one after the last."""
    kept = gates.to_end if gates.write is None else gates.to_end * gates.write
    added = key * kept.unsqueeze(-1)
    for chunk in walk.chunks_of(block):
        states[chunk] = carried
        carried.mul_(gates.total[chunk]).baddbmm_(added[chunk].mT, value[chunk])
    return carried


def _carry_back(walk: Walk, block: Block, gates: BlockGates, tokens: Tokens, carried: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient for the state at the end of each chunk of a block, and for the one before the first."""
    seen = tokens.query * gates.from_start.unsqueeze(-1)
    arrived = carried.new_empty(len(seen), *carried.shape[1:])
    for chunk in reversed(list(walk.chunks_of(block))):
        arrived[chunk] = carried
        carried.mul_(gates.total[chunk]).baddbmm_(seen[chunk].mT, tokens.error[chunk])
    return arrived, carried


def _read(gates: BlockGates, query: Tensor, key: Tensor, value: Tensor, states: Tensor) -> Tensor:
    """The output [n, C, V] of the chunks of a block."""
    scores = torch.bmm(query, key.mT).mul_(gates.within)
    if gates.write is not None:
        scores.mul_(gates.write.unsqueeze(1))
    return torch.bmm(query * gates.from_start.unsqueeze(-1), states).baddbmm_(scores, value)


def _spread(tokens: Tokens, gates: BlockGates, state: Tensor, arrived: Tensor) -> tuple[Tensor, ...]:
    """Gradients of q, k, v [n, C, ...], log decays and write gates [n, C] of the chunks of a block.

    `state` [n, K, V] is the one at the start of each chunk, and `arrived` the gradient for the one at its end.
    """
    query, key, value, error = tokens
    within, from_start, to_end, write = gates.within, gates.from_start, gates.to_end, gates.write
    weights = within if write is None else within * write.unsqueeze(1)
    start_column, end_column = from_start.unsqueeze(-1), (to_end if write is None else to_end * write).unsqueeze(-1)

    products = torch.bmm(query, key.mT)
    overlaps = torch.bmm(error, value.mT)
    pairs = (products * overlaps).mul_(within)
    products.mul_(weights)
    overlaps.mul_(weights)

    grad_query = torch.bmm(error, state.mT).mul_(start_column)
    from_state = torch.linalg.vecdot(query, grad_query)
    grad_query.baddbmm_(overlaps, key)

    grad_key = torch.bmm(value, arrived.mT)
    to_state = torch.linalg.vecdot(key, grad_key).mul_(to_end)
    grad_key.mul_(end_column).baddbmm_(overlaps.mT, query)

    grad_value = torch.bmm(key, arrived).mul_(end_column).baddbmm_(products.mT, error)

    through = torch.linalg.vecdot(state.flatten(1), arrived.flatten(1)).mul_(from_start[:, -1])
    grad_write = pairs.sum(dim=1).add_(to_state)
    if write is not None:
        pairs.mul_(write.unsqueeze(1))
        to_state.mul_(write)
    return grad_query, grad_key, grad_value, crossing(pairs, from_state, to_state, through), grad_write
