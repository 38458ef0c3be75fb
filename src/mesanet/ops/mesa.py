"""The Mesa rule in parallel over time: at every token, the ridge regression over all the tokens so far.

    H_t = gamma_t H_{t-1} + write_t k_t k_t^T
    G_t = gamma_t G_{t-1} + write_t v_t k_t^T
    o_t = G_t (H_t + diag(ridge))^-1 q_t

`ops/reference/mesa.py` says the same one token at a time. Derivations are in docs/maths.md.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mesanet.ops.checks import check_mesa
from mesanet.ops.chunks import chunk_layout
from mesanet.ops.mesa_chunked import ChunkedMesa
from mesanet.ops.mesa_step import mesa_step
from mesanet.ops.precision import own_precision
from mesanet.ops.reference.mesa import mesa as reference_mesa
from mesanet.ops.solver import ConjugateGradient
from mesanet.ops.state import MesaState

DEFAULT_SOLVER = ConjugateGradient()


class MesaOutput(NamedTuple):
    """What `mesa` returns."""

    output: Tensor
    """[B, T, H, V] in the dtype of v."""
    state: MesaState
    """The state after the last token, one row per sequence."""
    steps: Tensor
    """[B, T, H] int32: the solver steps that each token took."""


def mesa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    write: Tensor,
    ridge: Tensor,
    state: MesaState | None = None,
    solver: ConjugateGradient = DEFAULT_SOLVER,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
    sign: Tensor | None = None,
) -> MesaOutput:
    """Solve the ridge regression over all the tokens so far at every token, and read it out with the query.

    Takes q, k [B, T, H, K], v [B, T, H, V], log_decay and write [B, T, H], ridge [H, K] and a state of B rows, or of S
    rows where `cu_seqlens` [S + 1] packs S sequences end to end in a batch of one. T = 1 with a state is one step of
    decoding. `sign` [B, T, H] of +1 and -1 makes forget gates negative; the ridge must then be large enough to keep
    the systems positive definite.
    """
    sizes = check_mesa(q, k, v, log_decay, write, ridge, state, cu_seqlens, backend, sign)
    with own_precision(q.device):
        dtype = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32
        if state is None:
            kk = torch.zeros(sizes.sequences, sizes.heads, sizes.key, sizes.key, dtype=dtype, device=q.device)
            kv = torch.zeros(sizes.sequences, sizes.heads, sizes.key, sizes.value, dtype=dtype, device=q.device)
            state = MesaState(kk, kv)
        if backend == "reference":
            output, after = reference_mesa(q, k, v, log_decay, write, ridge, state, cu_seqlens, sign=sign)
            return MesaOutput(output.to(v.dtype), after, torch.zeros(q.shape[:3], dtype=torch.int32, device=q.device))
        state = MesaState(state.kk.to(dtype), state.kv.to(dtype))
        tensors = (q, k, v, log_decay, write, ridge, *state)
        wants_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if sizes.time == 1 and cu_seqlens is None and not wants_gradient:
            output, after, steps = mesa_step(q, k, v, log_decay, write, ridge, state, solver, sign)
            return MesaOutput(output.to(v.dtype), after, steps)
        layout = chunk_layout(q.shape[0], q.shape[1], cu_seqlens)
        # Only the symmetric part of kk has a meaning; taking it here makes its gradient symmetric too.
        symmetric_kk = 0.5 * (state.kk + state.kk.mT)
        output, kk, kv, steps = ChunkedMesa.apply(  # type: ignore[no-untyped-call]
            q, k, v, log_decay, write, ridge, symmetric_kk, state.kv, sign, solver, layout
        )
        return MesaOutput(output, MesaState(kk, kv), steps)
