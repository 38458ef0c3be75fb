"""The delta rule with a forget gate."""

from __future__ import annotations

from torch import Tensor

from mesanet.ops.reference.sequences import forget_factor, outer, over_sequences, per_state, read, stack_time


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    write: Tensor,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sign: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Forget, then correct what the state answers to k_t towards v_t; without `log_decay` this is DeltaNet.

    q, k [B, T, H, K]; v [B, T, H, V]; log_decay, write, sign [B, T, H]; state [B, H, K, V] -> output [B, T, H, V],
    state.
    """

    def rule(
        q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, write: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        kv = k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3]) if state is None else state
        outputs = []
        for t in range(q.shape[1]):
            kv = per_state(gamma[:, t]) * kv
            correction = v[:, t] - read(kv, k[:, t])
            kv = kv + per_state(write[:, t]) * outer(k[:, t], correction)
            outputs.append(read(kv, q[:, t]))
        return stack_time(outputs, v), kv

    gamma = forget_factor(log_decay, sign, k)
    return over_sequences(rule, {"q": q, "k": k, "v": v, "gamma": gamma, "write": write}, state, cu_seqlens)
