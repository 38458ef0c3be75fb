"""One token of the Mesa rule, for decoding: the state is at hand, so H_t can be formed and solved as it stands."""

from __future__ import annotations

import torch
from torch import Tensor

from mesanet.ops.solver import ConjugateGradient, solve
from mesanet.ops.state import MesaState
from mesanet.ops.workspace import Workspace


class DenseSystems:
    """Systems given as matrices [n, K, K]; vectors are [n, 1, K]."""

    def __init__(self, matrix: Tensor, direct: bool) -> None:
        """With `direct`, a factorisation serves as start value and as preconditioner."""
        self.matrix = matrix
        self.factors = torch.linalg.lu_factor_ex(matrix)[:2] if direct else None

    def matvec(self, vector: Tensor) -> Tensor:
        """The matrices times the vectors; they are symmetric."""
        return torch.bmm(vector, self.matrix)

    def precondition(self, residual: Tensor) -> Tensor | None:
        """The solution by the factorisation, if there is one."""
        if self.factors is None:
            return None
        solution: Tensor = torch.linalg.lu_solve(*self.factors, residual.mT)
        return solution.mT

    def start(self, rhs: Tensor) -> tuple[Tensor, Tensor]:
        """The factorisation's answer, or the paper's start value rhs / diag(H_t + ridge)."""
        answer = self.precondition(rhs)
        x = rhs / self.matrix.diagonal(dim1=1, dim2=2).unsqueeze(1) if answer is None else answer.contiguous()
        return x, self.matvec(x)


def mesa_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    write: Tensor,
    ridge: Tensor,
    state: MesaState,
    solver: ConjugateGradient,
    sign: Tensor | None = None,
) -> tuple[Tensor, MesaState, Tensor]:
    """Output [B, 1, H, V], state and steps [B, 1, H] of a single token; arguments as for `mesa`, without gradients."""
    batch, _, heads, _ = q.shape
    dtype = state.kk.dtype
    gamma = log_decay.to(dtype).exp()
    if sign is not None:
        gamma = gamma * sign
    gamma, write = (gate.to(dtype).reshape(batch * heads, 1, 1) for gate in (gamma, write))
    q, k, v = (tensor.to(dtype).reshape(batch * heads, 1, -1) for tensor in (q, k, v))
    written = (k * write).mT
    kk = torch.baddbmm(state.kk.flatten(0, 1) * gamma, written, k)
    kv = torch.baddbmm(state.kv.flatten(0, 1) * gamma, written, v)

    direct = solver.preconditioner == "auto" and solver.max_steps > 0 and sign is None
    matrix = torch.add(kk, kk.mT).mul_(0.5)
    matrix.unflatten(0, (batch, heads)).diagonal(dim1=-2, dim2=-1).add_(ridge)
    systems = DenseSystems(matrix, direct)
    solution = solve(systems, q.clone(), solver, Workspace(dtype, q.device))
    output = torch.bmm(solution.value, kv).view(batch, 1, heads, -1)
    after = MesaState(kk.view(state.kk.shape), kv.view(state.kv.shape))
    return output, after, solution.steps.view(batch, 1, heads)
