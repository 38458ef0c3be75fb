"""LongHorn: the closed-form minimiser of one token's loss near the last state, and its diagonal approximation."""

from __future__ import annotations

from torch import Tensor

from mesanet.ops.reference.sequences import outer, over_sequences, read, stack_time


def longhorn_exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    precision: Tensor,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The rank-one rule: a delta rule with its own step size for each value channel.

    q, k [B, T, H, K]; v, precision [B, T, H, V]; state [B, H, K, V] -> output [B, T, H, V], state.
    """

    def rule(q: Tensor, k: Tensor, v: Tensor, step: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        kv = k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3]) if state is None else state
        outputs = []
        for t in range(q.shape[1]):
            correction = v[:, t] - read(kv, k[:, t])
            kv = kv + outer(k[:, t], step[:, t] * correction)
            outputs.append(read(kv, q[:, t]))
        return stack_time(outputs, v), kv

    tensors: dict[str, Tensor | None] = {"q": q, "k": k, "v": v, "step": longhorn_step(k, precision)}
    return over_sequences(rule, tensors, state, cu_seqlens)


def longhorn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    precision: Tensor,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The diagonal rule that LongHorn models use: kv = (1 - k^2 step^T) * kv + k (step * v)^T; shapes as above."""

    def rule(q: Tensor, k: Tensor, v: Tensor, step: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        kv = k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3]) if state is None else state
        outputs = []
        for t in range(q.shape[1]):
            kv = (1 - outer(k[:, t].square(), step[:, t])) * kv + outer(k[:, t], step[:, t] * v[:, t])
            outputs.append(read(kv, q[:, t]))
        return stack_time(outputs, v), kv

    tensors: dict[str, Tensor | None] = {"q": q, "k": k, "v": v, "step": longhorn_step(k, precision)}
    return over_sequences(rule, tensors, state, cu_seqlens)


def longhorn_step(k: Tensor, precision: Tensor) -> Tensor:
    """precision / (1 + precision k^T k) for each value channel: [B, T, H, V]."""
    return precision / (1 + precision * k.square().sum(dim=-1, keepdim=True))
