"""The Mesa rule's systems (H_t + ridge) x_t = b_t for all the tokens of a few chunks, without forming any H_t.

Within a chunk that starts with the state H, token t sees

    A_t = from_start_t H + sum_{s <= t} zeta_ts write_s k_s k_s^T + diag(ridge),

so a product with A_t is one step of gated linear attention whose values are its keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mesanet.ops.decay import ChunkDecay
from mesanet.ops.spd_inverse import spd_inverse

SLOW = 0.25
"""A chunk that keeps at least this much of its state gets a preconditioner; one that keeps less converges fast without."""


class Preconditioner:
    """The inverse of all the systems of a chunk at once, exact but for how the regulariser fades within the chunk.

    Divided by from_start_t, the systems differ by a key each and by ridge / from_start_t. With that last term held at its
    value in mid-chunk they are nested, M_t^-1 = M_0^-1 + sum_{s <= t} a_s a_s^T with a_s = sqrt(write_s / from_start_s) k_s
    and M_0 = (H + ridge / from_start_mid)^-1, and one Cholesky factorisation L L^T = I + a M_0 a^T inverts them all:

        M_t = M_0 - sum_{s <= t} u_s u_s^T,    u = L^-1 a M_0.

    The eigenvalues of M_t A_t / from_start_t then lie within the ratio of from_start_mid to from_start_t of one, whatever
    the keys are. See docs/maths.md, "The preconditioner".
    """

    def __init__(self, keys: Tensor, kk: Tensor, from_start: Tensor, write: Tensor, ridge: Tensor) -> None:
        """keys [n, C, K], kk [n, K, K], from_start and write [n, C], ridge [n, K]."""
        chunk = keys.shape[1]
        middle = from_start[:, (chunk - 1) // 2, None]
        inverse = spd_inverse(kk + torch.diag_embed(ridge / middle))
        scaled_keys = keys * (write / from_start).sqrt_().unsqueeze(-1)
        keys_inverse = scaled_keys @ inverse
        gram = torch.baddbmm(torch.eye(chunk, dtype=keys.dtype, device=keys.device), keys_inverse, scaled_keys.mT)
        factor, _ = torch.linalg.cholesky_ex(gram)
        updates = torch.linalg.solve_triangular(factor, keys_inverse, upper=False)
        self.bank = torch.cat([inverse, updates], dim=1)
        """[n, K + C, K] M_0 above the rows u_s."""

    def disable(self, problems: Tensor) -> None:
        """Turn the map into the identity for the marked problems [n]."""
        size = self.bank.shape[-1]
        self.bank[problems, :size] = torch.eye(size, dtype=self.bank.dtype, device=self.bank.device)
        self.bank[problems, size:] = 0.0

    def __call__(self, residual: Tensor, wide: Tensor, scores: Tensor, out: Tensor) -> Tensor:
        """M_t residual_t for every token; the other arguments are room to work in."""
        size = residual.shape[-1]
        torch.bmm(residual, self.bank[:, size:].mT, out=scores)
        wide[..., :size].copy_(residual)
        torch.neg(scores.tril_(), out=wide[..., size:])
        return torch.bmm(wide, self.bank, out=out)


class RidgeSystems:
    """The systems of n chunks, as the solver wants them; vectors are [n, C, K]."""

    def __init__(
        self,
        keys: Tensor,
        kk: Tensor,
        decay: ChunkDecay,
        write: Tensor,
        ridge: Tensor,
        preconditioner: Preconditioner | None = None,
    ) -> None:
        """keys [n, C, K], kk [n, K, K] at the start of each chunk, write [n, C], ridge [n, K]."""
        problems, chunk, size = keys.shape
        self.keys = keys
        self.ridge = ridge.unsqueeze(1)
        self.from_start = decay.from_start.unsqueeze(-1)
        self.weights = decay.within * write.unsqueeze(1)
        self.bank = torch.cat([kk, keys], dim=1)
        self.preconditioner = preconditioner
        self._wide = keys.new_empty(problems, chunk, size + chunk)
        self._scores = keys.new_empty(problems, chunk, chunk)
        self._product = torch.empty_like(keys)
        self._direction = torch.empty_like(keys)

    def matvec(self, vector: Tensor) -> Tensor:
        """(H_t + ridge) vector_t for every token."""
        size = vector.shape[-1]
        torch.bmm(vector, self.keys.mT, out=self._scores)
        torch.mul(vector, self.from_start, out=self._wide[..., :size])
        torch.mul(self._scores, self.weights, out=self._wide[..., size:])
        torch.mul(vector, self.ridge, out=self._product)
        return self._product.baddbmm_(self._wide, self.bank)

    def diagonal(self) -> Tensor:
        """diag(H_t + ridge) for every token, [n, C, K]."""
        size = self.keys.shape[-1]
        state = self.bank[:, :size].diagonal(dim1=1, dim2=2).unsqueeze(1)
        return torch.baddbmm(self.from_start * state + self.ridge, self.weights, self.keys.square())

    def precondition(self, residual: Tensor) -> Tensor | None:
        """About (H_t + ridge)^-1 residual_t times from_start_t, or None for the plain method."""
        if self.preconditioner is None:
            return None
        return self.preconditioner(residual, self._wide, self._scores, self._direction)

    def start(self, rhs: Tensor) -> tuple[Tensor, Tensor]:
        """The paper's start value rhs / diag(H_t + ridge), or the preconditioner's answer where there is one."""
        if self.preconditioner is None:
            x = rhs / self.diagonal()
            return x, rhs - self.matvec(x)
        x = self.preconditioner(rhs, self._wide, self._scores, self._direction) / self.from_start
        r = rhs - self.matvec(x)
        # Rounding can spoil the inverse of an extremely ill-conditioned state; such a chunk goes on without.
        sound = (torch.linalg.vector_norm(r, dim=-1) <= 2 * torch.linalg.vector_norm(rhs, dim=-1)).all(dim=-1)
        if not bool(sound.all()):
            self.preconditioner.disable(~sound)
            x = torch.where(sound[:, None, None], x, rhs / self.diagonal())
            r = rhs - self.matvec(x)
        return x, r
