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
from mesanet.ops.workspace import Workspace

SLOW = 0.25
"""A chunk that keeps at least this much of its state gets a preconditioner; others converge fast without."""


class Preconditioner:
    """The inverse of all the systems of a chunk at once, exact but for how the regulariser fades within the chunk.

    Divided by from_start_t, the systems differ by a key each and by ridge / from_start_t. With that last term held at
    its value in mid-chunk they are nested: with a_s = sqrt(write_s / from_start_s) k_s,

        M_t^-1 = M_0^-1 + sum_{s <= t} a_s a_s^T,    M_0 = (H + ridge / from_start_mid)^-1,

    and one Cholesky factorisation L L^T = I + a M_0 a^T inverts them all:

        M_t = M_0 - sum_{s <= t} u_s u_s^T,    u = L^-1 a M_0.

    The eigenvalues of M_t A_t / from_start_t then lie between one and from_start_mid / from_start_t, whatever the keys
    are. See docs/maths.md, "The preconditioner".
    """

    def __init__(self, bank: Tensor, from_start: Tensor, write: Tensor, ridge: Tensor) -> None:
        """bank [n, K + C, K] is the state above the keys; from_start and write [n, C], ridge [n, K]."""
        chunk, size = from_start.shape[1], bank.shape[-1]
        kk, keys = bank[:, :size], bank[:, size:]
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


class RidgeSystems:
    """The systems of n chunks, as the solver wants them; vectors are [n, C, K]."""

    def __init__(
        self,
        bank: Tensor,
        decay: ChunkDecay,
        write: Tensor,
        ridge: Tensor,
        workspace: Workspace,
        preconditioner: Preconditioner | None = None,
    ) -> None:
        """bank [n, K + C, K] is the state at the start of each chunk above its keys; write [n, C], ridge [n, K].

        No two systems with the same workspace can be in use at the same time.
        """
        problems, wide, size = bank.shape
        chunk = wide - size
        self.bank = bank
        self.kk, self.keys = bank[:, :size], bank[:, size:]
        self.ridge = ridge.unsqueeze(1)
        self.from_start = decay.from_start.unsqueeze(-1)
        self.weights = decay.within.mul_(write.unsqueeze(1))
        self.preconditioner = preconditioner
        self._wide = workspace.room("wide", problems, chunk, wide)
        self._scores = workspace.room("scores", problems, chunk, chunk)
        self._product = workspace.room("product", problems, chunk, size)
        self._direction = workspace.room("direction", problems, chunk, size)
        self._solution = workspace.room("solution", problems, chunk, size)

    def matvec(self, vector: Tensor) -> Tensor:
        """(H_t + ridge) vector_t for every token."""
        size = vector.shape[-1]
        torch.bmm(vector, self.keys.mT, out=self._scores)
        torch.mul(vector, self.from_start, out=self._wide[..., :size])
        torch.mul(self._scores, self.weights, out=self._wide[..., size:])
        torch.mul(vector, self.ridge, out=self._product)
        return self._product.baddbmm_(self._wide, self.bank)

    def precondition(self, residual: Tensor) -> Tensor | None:
        """from_start_t times about (H_t + ridge)^-1 residual_t, or None for the plain method."""
        if self.preconditioner is None:
            return None
        size = residual.shape[-1]
        bank = self.preconditioner.bank
        torch.bmm(residual, bank[:, size:].mT, out=self._scores)
        self._wide[..., :size].copy_(residual)
        torch.neg(self._scores.tril_(), out=self._wide[..., size:])
        return torch.bmm(self._wide, bank, out=self._direction)

    def start(self, rhs: Tensor) -> tuple[Tensor, Tensor]:
        """The paper's start value rhs / diag(H_t + ridge), or the preconditioner's answer where there is one."""
        answer = self.precondition(rhs)
        if answer is None or self.preconditioner is None:
            x = self._plain_start(rhs)
            return x, self.matvec(x)
        x = torch.div(answer, self.from_start, out=self._solution)
        product = self.matvec(x)
        # Rounding can spoil the inverse of an extremely ill-conditioned state; such a chunk goes on without.
        missed = torch.linalg.vector_norm(torch.sub(rhs, product, out=self._direction), dim=-1)
        sound = (missed <= 2 * torch.linalg.vector_norm(rhs, dim=-1)).all(dim=-1)
        if not bool(sound.all()):
            self.preconditioner.disable(~sound)
            good = x[sound]
            x = self._plain_start(rhs)
            x[sound] = good
            product = self.matvec(x)
        return x, product

    def _plain_start(self, rhs: Tensor) -> Tensor:
        """rhs / diag(H_t + ridge) for every token, [n, C, K]."""
        state = self.kk.diagonal(dim1=1, dim2=2).unsqueeze(1)
        diagonal = torch.addcmul(self.ridge, self.from_start, state, out=self._product)
        diagonal.baddbmm_(self.weights, torch.square(self.keys, out=self._direction))
        return torch.div(rhs, diagonal, out=self._solution)
