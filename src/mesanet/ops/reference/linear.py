"""Linear attention with a forget gate, and mLSTM, which adds exponential input gates and a normaliser."""

from __future__ import annotations

import torch
from torch import Tensor

from mesanet.ops.reference.sequences import forget_factor, outer, over_sequences, per_state, read, stack_time
from mesanet.ops.state import MlstmState

STABILISER_FLOOR = -1e30
"""Lowest stabiliser: what is written below exp(-1e30) is nothing beside the denominator's lower bound of one.

It keeps tokens with both gates shut from making differences of infinities.
"""


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    write: Tensor | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sign: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """kv_t = gamma_t kv_{t-1} + write_t k_t v_t^T, output_t = kv_t^T q_t; without `write` this is Mamba2's recurrence.

    q, k [B, T, H, K]; v [B, T, H, V]; log_decay, write, sign [B, T, H]; state [B, H, K, V] -> output [B, T, H, V],
    state.
    """

    def rule(
        q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, write: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        kv = k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3]) if state is None else state
        outputs = []
        for t in range(q.shape[1]):
            association = outer(k[:, t], v[:, t])
            written = association if write is None else per_state(write[:, t]) * association
            kv = per_state(gamma[:, t]) * kv + written
            outputs.append(read(kv, q[:, t]))
        return stack_time(outputs, v), kv

    gamma = forget_factor(log_decay, sign, k)
    return over_sequences(rule, {"q": q, "k": k, "v": v, "gamma": gamma, "write": write}, state, cu_seqlens)


def mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_forget: Tensor,
    log_input: Tensor,
    state: MlstmState | None = None,
    cu_seqlens: Tensor | None = None,
    epsilon: float = 1e-6,
) -> tuple[Tensor, MlstmState]:
    """mLSTM in its stabilised form: output = kv^T q / (max(|normaliser^T q|, exp(-stabiliser)) + epsilon).

    q, k [B, T, H, K]; v [B, T, H, V]; log_forget (<= 0), log_input (any size) [B, T, H] -> output [B, T, H, V], state.
    The queries are used as they come: xLSTM's factor K^-1/2 is the caller's.
    """

    def rule(
        q: Tensor, k: Tensor, v: Tensor, log_forget: Tensor, log_input: Tensor, state: MlstmState | None
    ) -> tuple[Tensor, MlstmState]:
        if state is None:
            kv = k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3])
            normaliser, stabiliser = kv[..., 0], k.new_zeros(k.shape[0], k.shape[2])
        else:
            kv, normaliser, stabiliser = state
        # Keeps the stabiliser finite where both gates are shut, so that no difference of two infinities arises.
        floor = torch.full_like(stabiliser, STABILISER_FLOOR)
        outputs = []
        for t in range(q.shape[1]):
            kept = log_forget[:, t] + stabiliser
            stabiliser = torch.maximum(torch.maximum(kept, log_input[:, t]), floor)
            forget, write = torch.exp(kept - stabiliser), torch.exp(log_input[:, t] - stabiliser)
            kv = per_state(forget) * kv + per_state(write) * outer(k[:, t], v[:, t])
            normaliser = forget[..., None] * normaliser + write[..., None] * k[:, t]
            overlap = (normaliser * q[:, t]).sum(dim=-1)
            # Numerator and denominator both times exp(min(stabiliser, 0)): exp(-stabiliser) alone could overflow.
            scale = torch.exp(stabiliser.clamp(max=0))
            least = torch.exp(-stabiliser.clamp(min=0))
            denominator = torch.maximum(overlap.abs() * scale, least) + epsilon * scale
            outputs.append(read(kv, q[:, t]) * (scale / denominator)[..., None])
        return stack_time(outputs, v), MlstmState(kv, normaliser, stabiliser)

    tensors = {"q": q, "k": k, "v": v, "log_forget": log_forget, "log_input": log_input}
    return over_sequences(rule, tensors, state, cu_seqlens)
