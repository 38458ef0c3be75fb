"""The Mesa rule in parallel over time: at every token, the ridge regression over all the tokens so far.

    H_t = gamma_t H_{t-1} + write_t k_t k_t^T
    G_t = gamma_t G_{t-1} + write_t v_t k_t^T
    o_t = G_t (H_t + diag(ridge))^-1 q_t

`ops/reference/mesa.py` says the same one token at a time. Derivations are in docs/maths.md.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mesanet.ops.checks import check_mesa
from mesanet.ops.chunks import chunk_layout
from mesanet.ops.gated import computing_dtype
from mesanet.ops.mesa_chunked import ChunkedMesa
from mesanet.ops.mesa_step import mesa_step
from mesanet.ops.precision import own_precision
from mesanet.ops.reference.mesa import mesa as _token_by_token
from mesanet.ops.solver import ConjugateGradient
from mesanet.ops.state import MesaState

DEFAULT_SOLVER = ConjugateGradient()


class MesaOutput(NamedTuple):
    """What `mesa` returns."""

    output: Float[Tensor, "B T H V"]
    """In the dtype of v."""
    state: MesaState
    """The state after the last token, one row per sequence."""
    steps: Int[Tensor, "B T H"]
    """The solver steps that each token took."""


def mesa(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    log_decay: Float[Tensor, "B T H"],
    write: Float[Tensor, "B T H"],
    ridge: Float[Tensor, "H K"],
    state: MesaState | None = None,
    solver: ConjugateGradient = DEFAULT_SOLVER,
    cu_seqlens: Int[Tensor, " bounds"] | None = None,
    backend: str = "auto",
    sign: Float[Tensor, "B T H"] | None = None,
) -> MesaOutput:
    """Solve the ridge regression over all the tokens so far at every token, and read it out with the query.

    The gates are log_decay <= 0 (minus infinity forgets everything) and write in [0, 1]; the ridge is positive. The
    state has B rows, or S rows where `cu_seqlens` [S + 1] packs S sequences end to end in a batch of one. T = 1 with a
    state is one step of decoding. `sign` of +1 and -1 makes forget gates negative; the ridge must then be large enough
    to keep the systems positive definite.

    States and solver are float64 if q, k or v are, else float32, under autocast and TensorFloat-32 too. A token that
    took fewer than `max_steps` has a relative residual within the tolerance as float32 sees it; where the condition
    number of its system exceeds about tolerance / 1e-7, rounding alone leaves more (docs/maths.md, "Numbers").

    Gradients are first derivatives by `torch.autograd`; `backend="reference"`, one token at a time and solved
    directly, has them of any order and under `torch.func.grad`.
    """
    sizes = check_mesa(q, k, v, log_decay, write, ridge, state, solver, cu_seqlens, backend, sign)
    with own_precision(q.device):
        dtype = computing_dtype(q, k, v)
        if state is None:
            kk = torch.zeros(sizes.sequences, sizes.heads, sizes.key, sizes.key, dtype=dtype, device=q.device)
            kv = torch.zeros(sizes.sequences, sizes.heads, sizes.key, sizes.value, dtype=dtype, device=q.device)
            state = MesaState(kk, kv)
        state = MesaState(state.kk.to(dtype), state.kv.to(dtype))
        if backend == "reference":
            wide_q, wide_k, wide_v = q.to(dtype), k.to(dtype), v.to(dtype)
            gates = (log_decay.to(dtype), write.to(dtype))
            wide_sign = None if sign is None else sign.to(dtype)
            output, after = _token_by_token(
                wide_q, wide_k, wide_v, *gates, ridge.to(dtype), state, cu_seqlens, wide_sign
            )
            return MesaOutput(output.to(v.dtype), after, torch.zeros(q.shape[:3], dtype=torch.int32, device=q.device))
        _refuse_transforms()
        tensors = (q, k, v, log_decay, write, ridge, *state)
        wants_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if backend == "auto" and sizes.time == 1 and cu_seqlens is None and not wants_gradient:
            output, after, steps = mesa_step(q, k, v, log_decay, write, ridge, state, solver, sign)
            return MesaOutput(output.to(v.dtype), after, steps)
        layout = chunk_layout(q.shape[0], q.shape[1], cu_seqlens)
        # Only the symmetric part of kk has a meaning; taking it here makes its gradient symmetric too.
        symmetric_kk = 0.5 * (state.kk + state.kk.mT)
        output, kk, kv, steps = ChunkedMesa.apply(  # type: ignore[no-untyped-call]
            q, k, v, log_decay, write, ridge, symmetric_kk, state.kv, sign, solver, layout, wants_gradient
        )
        return MesaOutput(output, MesaState(kk, kv), steps)


def _refuse_transforms() -> None:
    """What follows works in place on rooms of its own, which `torch.func` can't see through."""
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "mesanet.mesa: got a call inside torch.func (grad, vmap, jvp ...), expected plain torch.autograd; "
            'backend="reference" works with torch.func'
        )
