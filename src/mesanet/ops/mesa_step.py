"""One token of the Mesa rule, for decoding: the state is at hand, so H_t can be formed and solved as it stands."""

from __future__ import annotations

import torch
from torch import Tensor

from mesanet.ops.solver import ConjugateGradient, solve
from mesanet.ops.state import MesaState
from mesanet.ops.workspace import Workspace


class DenseSystems:
    """Systems kk + diag(ridge) given as kk [n, K, K] and ridge [n, 1, K]; vectors are [n, 1, K]."""

    def __init__(self, kk: Tensor, ridge: Tensor, factorise: bool) -> None:
        """Where they are factorised, that serves as the answer, or as start value and preconditioner."""
        self.kk = kk
        self.ridge = ridge
        self._unsound: Tensor | None = None
        self._factors: tuple[Tensor, Tensor] | None = None
        if factorise:
            matrix = kk.clone()
            matrix.diagonal(dim1=1, dim2=2).add_(ridge.squeeze(1))
            # LU rather than Cholesky: LAPACK's is up to three times as fast on a few matrices of this size.
            factors, pivots, _ = torch.linalg.lu_factor_ex(matrix)
            self._factors = factors, pivots

    def direct(self, rhs: Tensor, tolerance: float) -> Tensor | None:
        """The factorisation's answer, if for every row it is within the tolerance or as good as the dtype has it.

        A stable factorisation leaves no more than a rounding of the matrix does, and that is all that steps from there
        on could see of a residual.
        """
        if self._factors is None:
            return None
        x: Tensor = torch.linalg.lu_solve(*self._factors, rhs.mT).mT
        norm = torch.linalg.vector_norm
        missed = norm(torch.sub(self.matvec(x), rhs), dim=-1)
        size = norm(self.kk, dim=(1, 2)).add_(self.ridge.amax(dim=(1, 2))).unsqueeze(-1)
        rounding = torch.finfo(rhs.dtype).eps * size * norm(x, dim=-1)
        good = missed <= torch.maximum(tolerance * norm(rhs, dim=-1), rounding)
        return x if bool(good.all()) else None

    def select(self, index: Tensor) -> DenseSystems:
        """The systems at `index`."""
        part = DenseSystems(self.kk[index], self.ridge[index], factorise=False)
        if self._factors is not None:
            part._factors = self._factors[0][index], self._factors[1][index]
            part._unsound = None if self._unsound is None else self._unsound[index]
        return part

    def matvec(self, vector: Tensor) -> Tensor:
        """The systems times the vectors; the ridge apart, as it may be less than a rounding of a large kk."""
        return torch.baddbmm(vector * self.ridge, vector, self.kk)

    def precondition(self, residual: Tensor) -> Tensor | None:
        """The solution by the factorisation where there is a sound one, else the residual."""
        if self._factors is None:
            return None
        solution: Tensor = torch.linalg.lu_solve(*self._factors, residual.mT).mT
        return solution if self._unsound is None else torch.where(self._unsound, residual, solution)

    def start(self, rhs: Tensor) -> tuple[Tensor, Tensor]:
        """The factorisation's answer, or the paper's start value rhs / diag(H_t + ridge)."""
        answer = self.precondition(rhs)
        if answer is None:
            x = self._plain_start(rhs)
            return x, self.matvec(x)
        x = answer.contiguous()
        product = self.matvec(x)
        # Rounding can make an extremely ill-conditioned matrix singular; such a system goes on without.
        missed = torch.linalg.vector_norm(rhs - product, dim=-1, keepdim=True)
        sound = missed <= 2 * torch.linalg.vector_norm(rhs, dim=-1, keepdim=True)
        if not bool(sound.all()):
            self._unsound = ~sound
            x = torch.where(sound, x, self._plain_start(rhs))
            product = self.matvec(x)
        return x, product

    def _plain_start(self, rhs: Tensor) -> Tensor:
        return rhs / (self.kk.diagonal(dim1=1, dim2=2).unsqueeze(1) + self.ridge)


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
    batch, _, heads, size = q.shape
    problems, dtype = batch * heads, state.kk.dtype
    gamma = log_decay.to(dtype).exp()
    if sign is not None:
        gamma = gamma * sign
    gamma, write = (gate.to(dtype).reshape(problems, 1, 1) for gate in (gamma, write))
    q, k, v = (tensor.to(dtype).reshape(problems, 1, tensor.shape[-1]) for tensor in (q, k, v))
    before = state.kk.reshape(problems, size, size)
    # Only the symmetric part has a meaning, and it is what the state goes on with.
    written = k * write.sqrt()
    kk = torch.add(before, before.mT).mul_(0.5 * gamma).baddbmm_(written.mT, written)
    kv = torch.mul(state.kv.reshape(problems, size, v.shape[-1]), gamma).baddbmm_((k * write).mT, v)

    factorise = solver.preconditioner == "auto" and solver.max_steps > 0 and sign is None
    ridges = ridge.to(dtype).expand(batch, heads, size).reshape(problems, 1, size)
    systems = DenseSystems(kk, ridges, factorise)
    solved, steps = systems.direct(q, solver.tolerance), torch.zeros(problems, 1, dtype=torch.int32, device=q.device)
    if solved is None or solver.tolerance == 0:
        solved, steps, _ = solve(systems, q.clone(), solver, Workspace(dtype, q.device))
    output = torch.bmm(solved, kv).view(batch, 1, heads, v.shape[-1])
    after = MesaState(kk.view(state.kk.shape), kv.view(state.kv.shape))
    return output, after, steps.view(batch, 1, heads)
