"""The Mesa rule with a dense solve, and the original recursive least-squares layer."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mesanet.ops.reference.sequences import forget_factor, outer, over_sequences, per_state, read, stack_time
from mesanet.ops.state import MesaState, RecursiveMesaState


def mesa(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    log_decay: Float[Tensor, "B T H"],
    write: Float[Tensor, "B T H"],
    ridge: Float[Tensor, "H K"],
    state: MesaState | None = None,
    cu_seqlens: Int[Tensor, " bounds"] | None = None,
    sign: Float[Tensor, "B T H"] | None = None,
) -> tuple[Float[Tensor, "B T H V"], MesaState]:
    """Ridge regression over all the tokens so far, solved exactly at every token."""

    def rule(
        q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, write: Tensor, state: MesaState | None
    ) -> tuple[Tensor, MesaState]:
        if state is None:
            kk = k.new_zeros(k.shape[0], k.shape[2], k.shape[3], k.shape[3])
            kv = k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3])
        else:
            # Only the symmetric part of kk has a meaning; taking it here makes its gradient symmetric too.
            kk, kv = (state.kk + state.kk.mT) / 2, state.kv
        outputs = []
        for t in range(q.shape[1]):
            kk = per_state(gamma[:, t]) * kk + per_state(write[:, t]) * outer(k[:, t], k[:, t])
            kv = per_state(gamma[:, t]) * kv + per_state(write[:, t]) * outer(k[:, t], v[:, t])
            solved = solve(kk + torch.diag_embed(ridge), q[:, t], definite=sign is None)
            outputs.append(read(kv, solved))
        return stack_time(outputs, v), MesaState(kk, kv)

    gamma = forget_factor(log_decay, sign, k)
    return over_sequences(rule, {"q": q, "k": k, "v": v, "gamma": gamma, "write": write}, state, cu_seqlens)


def solve(matrix: Tensor, right: Tensor, definite: bool) -> Tensor:
    """matrix^-1 right, by Cholesky where the matrix is sure to be positive definite, else by LU."""
    if not definite:
        solution: Tensor = torch.linalg.solve(matrix, right.unsqueeze(-1))
        return solution.squeeze(-1)
    factor = torch.linalg.cholesky(matrix)
    return torch.cholesky_solve(right.unsqueeze(-1), factor).squeeze(-1)


def mesa_rls(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    log_decay: Float[Tensor, "B T H"],
    write: Float[Tensor, "B T H"],
    ridge: Float[Tensor, "H K"],
    state: RecursiveMesaState | None = None,
    cu_seqlens: Int[Tensor, " bounds"] | None = None,
) -> tuple[Float[Tensor, "B T H V"], RecursiveMesaState]:
    """The original recursive least-squares layer (Sherman-Morrison).

    The ridge enters only through the first inverse, so it fades with every forgetting, and the inverse is divided by
    the forget factor: log_decay must stay finite, and long strong forgetting makes the layer unstable, as published.
    """

    def rule(
        q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, write: Tensor, state: RecursiveMesaState | None
    ) -> tuple[Tensor, RecursiveMesaState]:
        if state is None:
            inverse = torch.diag_embed(1 / ridge).expand(k.shape[0], -1, -1, -1)
            kv = k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3])
        else:
            inverse, kv = state
        outputs = []
        for t in range(q.shape[1]):
            inverse = per_state(torch.exp(-log_decay[:, t])) * inverse
            pushed = read(inverse, k[:, t])
            gain = write[:, t] / (1 + write[:, t] * (k[:, t] * pushed).sum(dim=-1))
            inverse = inverse - per_state(gain) * outer(pushed, pushed)
            kv = per_state(torch.exp(log_decay[:, t])) * kv + per_state(write[:, t]) * outer(k[:, t], v[:, t])
            outputs.append(read(kv, read(inverse, q[:, t])))
        return stack_time(outputs, v), RecursiveMesaState(inverse, kv)

    tensors = {"q": q, "k": k, "v": v, "log_decay": log_decay, "write": write}
    return over_sequences(rule, tensors, state, cu_seqlens)
