"""The delta rule in parallel over time: DeltaNet, and Gated DeltaNet, which forgets.

    u_t = write_t (v_t - gamma_t kv_{t-1}^T k_t)
    kv_t = gamma_t kv_{t-1} + k_t u_t^T
    o_t = kv_t^T q_t

Within a chunk that begins with the state S, with zeta_ts the product of the gates after s up to t, and zeta_t0 all of
them up to t, the corrections u solve a unit lower triangular system (the UT transform):

    (I + L) u = write * (v - zeta_t0 k S)        L_ts = write_t zeta_ts k_t^T k_s for s < t

`ops/reference/delta.py` says the same one token at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mesanet.ops import reference
from mesanet.ops.blocks import Block, BlockGates, ChunkGates, Tokens, Walk, crossing
from mesanet.ops.checks import RANGES
from mesanet.ops.chunks import ChunkLayout, chunk_layout
from mesanet.ops.derivatives import first_derivative_only
from mesanet.ops.gated import Argument, cast, check_gated, computing_dtype, zero_state
from mesanet.ops.precision import own_precision


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    write: Tensor,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
    sign: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Forget, correct what the state answers to the key towards the value, and read with the query, at every token.

    Takes q, k [B, T, H, K], v [B, T, H, V], log_decay and write [B, T, H] (no log_decay is DeltaNet), and a state
    [B, H, K, V], or [S, H, K, V] where `cu_seqlens` [S + 1] packs S sequences end to end in a batch of one. `sign`
    [B, T, H] of +1 and -1 makes forget gates negative. Returns the output [B, T, H, V] and the last state. Keys of
    length one keep the rule stable.
    """
    gates = {
        "log_decay": Argument(log_decay, "B T H", RANGES["log_decay"]),
        # DeltaNet's steps of up to two turn keys around, and none of any size is wrong in itself.
        "write": Argument(write, "B T H", RANGES["free"]),
        "sign": Argument(sign, "B T H", RANGES["sign"]),
    }
    sizes = check_gated(q, k, v, gates, {"state": Argument(state, "S H K V")}, cu_seqlens, backend)
    dtype = computing_dtype(q, k, v)
    state = zero_state(sizes, dtype, q.device) if state is None else state.to(dtype)
    # One token at a time has nothing to do in parallel.
    if backend == "reference" or (sizes.time == 1 and backend == "auto"):
        q_, k_, v_, write_ = cast(dtype, q, k, v, write)
        decay_ = None if log_decay is None else log_decay.to(dtype)
        output, last = reference.gated_delta_rule(q_, k_, v_, decay_, write_, state, cu_seqlens, sign)
        return output.to(v.dtype), last
    layout = chunk_layout(sizes.batch, sizes.time, cu_seqlens)
    output, last = ChunkedDeltaRule.apply(q, k, v, log_decay, write, state, sign, layout)  # type: ignore[no-untyped-call]
    return output, last


class ChunkedDeltaRule(torch.autograd.Function):
    """The rule chunk by chunk; the backward pass reads what the forward pass has kept."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        write: Tensor,
        state: Tensor,
        sign: Tensor | None,
        layout: ChunkLayout,
    ) -> tuple[Tensor, Tensor]:
        """Returns the output [B, T, H, V] and the states after the last token."""
        with own_precision(q.device):
            walk = Walk.plan(layout, q, state.dtype)
            gates = ChunkGates.split(walk, torch.zeros_like(write) if log_decay is None else log_decay, write, sign)
            states = walk.states(q.shape[-1], v.shape[-1], q.device)
            corrections = walk.states(layout.chunk, v.shape[-1], q.device)
            inverses = walk.states(layout.chunk, layout.chunk, q.device)
            output, last = torch.empty_like(v, memory_format=torch.contiguous_format), state.clone()
            for block in walk.blocks:
                query, key, value = (walk.load(tensor, block) for tensor in (q, k, v))
                rows = walk.rows(block)
                part = gates.block(rows)
                if block.first:
                    carried = state[block.sequences].flatten(0, 1).clone()
                inverse = _inverse(part, key, inverses[rows])
                carried = _carry(walk, block, part, key, value, inverse, carried, states[rows], corrections[rows])
                scores = torch.bmm(query, key.mT).mul_(part.within)
                read = torch.bmm(query * part.from_start.unsqueeze(-1), states[rows])
                walk.store(output, read.baddbmm_(scores, corrections[rows]), block)
                if block.last:
                    last[block.sequences] = carried.view_as(last[block.sequences])
            ctx.save_for_backward(q, k, v, log_decay, write, sign, states, corrections, inverses)
            ctx.walk = walk
            return output, last

    @staticmethod
    @first_derivative_only("mesanet.ops.gated_delta_rule")
    def backward(ctx: Any, grad_output: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for the six tensors of `forward`."""
        q, k, v, log_decay, write, sign, states, corrections, inverses = ctx.saved_tensors
        walk: Walk = ctx.walk
        with own_precision(q.device):
            gates = ChunkGates.split(walk, torch.zeros_like(write) if log_decay is None else log_decay, write, sign)
            grads = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (q, k, v)]
            grad_decay, grad_write = torch.empty_like(gates.log_decay), torch.empty_like(gates.log_decay)
            grad_initial = grad_state.clone()
            for block in reversed(walk.blocks):
                tokens = Tokens(*(walk.load(tensor, block) for tensor in (q, k, v, grad_output)))
                rows = walk.rows(block)
                part = gates.block(rows)
                if block.last:
                    carried = grad_state[block.sequences].flatten(0, 1).clone()
                products = torch.bmm(tokens.query, tokens.key.mT)
                right, arrived, carried = _carry_back(walk, block, part, tokens, products, inverses[rows], carried)
                kept = Kept(states[rows], corrections[rows])
                *token_grads, grad_decay[rows], grad_write[rows] = _spread(tokens, part, products, kept, right, arrived)
                for target, grad in zip(grads, token_grads, strict=True):
                    walk.store(target, grad, block)
                if block.first:
                    grad_initial[block.sequences] = carried.view_as(grad_initial[block.sequences])
            merged_decay = None if log_decay is None else walk.merge(grad_decay, log_decay.dtype)
            merged_write = walk.merge(grad_write, write.dtype)
        return *grads, merged_decay, merged_write, grad_initial, None, None


class Kept(NamedTuple):
    """What the forward pass has kept of the chunks of a block: first states [n, K, V] and corrections u [n, C, V]."""

    state: Tensor
    correction: Tensor


def _gate(gates: BlockGates) -> Tensor:
    assert gates.write is not None
    return gates.write


def _inverse(gates: BlockGates, key: Tensor, out: Tensor) -> Tensor:
    """(I + L)^-1 [n, C, C]: by substitution, since powers of L can be huge where the inverse is small."""
    system = torch.bmm(key, key.mT).mul_(gates.within).mul_(_gate(gates).unsqueeze(-1))
    identity = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device).expand_as(system)
    return out.copy_(torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True))


def _carry(
    walk: Walk,
    block: Block,
    gates: BlockGates,
    key: Tensor,
    value: Tensor,
    inverse: Tensor,
    carried: Tensor,
    states: Tensor,
    corrections: Tensor,
) -> Tensor:
    """Write the first states and the corrections of the chunks of a block; return the state after the last."""
    write = _gate(gates).unsqueeze(-1)
    answered = key * (write * gates.from_start.unsqueeze(-1))
    right = value * write
    lasting = key * gates.to_end.unsqueeze(-1)
    for chunk in walk.chunks_of(block):
        states[chunk] = carried
        torch.bmm(inverse[chunk], right[chunk].baddbmm_(answered[chunk], carried, alpha=-1), out=corrections[chunk])
        carried.mul_(gates.total[chunk]).baddbmm_(lasting[chunk].mT, corrections[chunk])
    return carried


def _carry_back(
    walk: Walk,
    block: Block,
    gates: BlockGates,
    tokens: Tokens,
    products: Tensor,
    inverse: Tensor,
    carried: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk a block against time.

    Returns the gradient for the right-hand side of the triangular systems [n, C, V], for the state at the end of each
    chunk, and for the one before the first. `products` are q k^T.
    """
    answered = tokens.key * (_gate(gates) * gates.from_start).unsqueeze(-1)
    seen = tokens.query * gates.from_start.unsqueeze(-1)
    lasting = tokens.key * gates.to_end.unsqueeze(-1)
    for_correction = torch.bmm((products * gates.within).mT, tokens.error)
    right = torch.empty_like(for_correction)
    arrived = carried.new_empty(len(products), *carried.shape[1:])
    for chunk in reversed(list(walk.chunks_of(block))):
        arrived[chunk] = carried
        torch.bmm(inverse[chunk].mT, for_correction[chunk].baddbmm_(lasting[chunk], carried), out=right[chunk])
        carried.mul_(gates.total[chunk])
        carried.baddbmm_(seen[chunk].mT, tokens.error[chunk]).baddbmm_(answered[chunk].mT, right[chunk], alpha=-1)
    return right, arrived, carried


def _spread(
    tokens: Tokens, gates: BlockGates, products: Tensor, kept: Kept, right: Tensor, arrived: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v [n, C, ...], log decays and write gates [n, C] of the chunks of a block.

    `products` are q k^T, `right` [n, C, V] is the gradient for the right-hand side of the triangular systems, and
    `arrived` [n, K, V] the one for the state at the end of each chunk.
    """
    query, key, value, error = tokens
    within, write = gates.within, _gate(gates)
    start_column, write_column = gates.from_start.unsqueeze(-1), write.unsqueeze(-1)

    overlaps = torch.bmm(error, kept.correction.mT).mul_(within)
    pairs = products * overlaps
    # The gradient for L, of which the diagonal is no part, times zeta.
    system = torch.bmm(right, kept.correction.mT).neg_().tril_(-1).mul_(within)
    similar = torch.bmm(key, key.mT).mul_(system)
    system.mul_(write_column)

    grad_query = torch.bmm(error, kept.state.mT).mul_(start_column)
    from_state = torch.linalg.vecdot(query, grad_query)
    grad_query.baddbmm_(overlaps, key)

    grad_key = torch.bmm(kept.correction, arrived.mT).mul_(gates.to_end.unsqueeze(-1))
    to_state = torch.linalg.vecdot(key, grad_key)
    answer = torch.bmm(right, kept.state.mT).mul_(start_column)
    answered = torch.linalg.vecdot(key, answer)
    grad_key.sub_(answer.mul_(write_column))
    grad_key.baddbmm_(overlaps.mT, query).baddbmm_(system, key).baddbmm_(system.mT, key)

    grad_write = similar.sum(dim=-1).add_(torch.linalg.vecdot(right, value)).sub_(answered)
    through = torch.linalg.vecdot(kept.state.flatten(1), arrived.flatten(1)).mul_(gates.from_start[:, -1])
    pairs.add_(similar.mul_(write_column))
    grad_decay = crossing(pairs, from_state.sub_(answered.mul_(write)), to_state, through)
    return grad_query, grad_key, right * write_column, grad_decay, grad_write
