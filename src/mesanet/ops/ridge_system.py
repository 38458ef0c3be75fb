"""The Mesa rule's systems (H_t + ridge) x_t = b_t for all the tokens of a few chunks, without forming any H_t.

Within a chunk that starts with the state H, token t sees

    A_t = from_start_t H + sum_{s <= t} zeta_ts write_s k_s k_s^T + diag(ridge),

so a product with A_t is one step of gated linear attention whose values are its keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mesanet.ops.spd_inverse import spd_inverse
from mesanet.ops.workspace import Workspace


class Preconditioner(NamedTuple):
    """The inverse of the systems of many tokens of a chunk at once, exact but for how the regulariser fades meanwhile.

    Divided by from_start_t, the systems differ by a key each and by ridge / from_start_t. With that last term held at
    its value for one from_start_m in the middle they are nested: with a_s = sqrt(write_s / from_start_s) k_s,

        M_t^-1 = M_0^-1 + sum_{s <= t} a_s a_s^T,    M_0 = (H + ridge / from_start_m)^-1,

    and one Cholesky factorisation L L^T = I + a M_0 a^T inverts them all:

        M_t = M_0 - sum_{s <= t} u_s u_s^T,    u = L^-1 a M_0.

    The eigenvalues of M_t A_t / from_start_t then lie between one and from_start_m / from_start_t, whatever the keys
    are. See docs/maths.md, "The preconditioner".
    """

    inverse: Tensor
    """[n, K, K] M_0"""
    updates: Tensor
    """[n, C, K] the rows u_s"""
    from_start: Tensor
    """[n, C, 1] for the tokens that it is meant for, and one for the others."""

    @staticmethod
    def of(systems: RidgeSystems, tokens: Tensor) -> Preconditioner:
        """One for each problem, meant for these `tokens` [n, C, 1], of which no chunk has lost its state yet."""
        from_start = systems.from_start
        lowest = torch.where(tokens, from_start, 1.0).amin(dim=1)
        middle = (torch.where(tokens, from_start, 0.0).amax(dim=1) * lowest).sqrt_()
        matrix = systems.kk.clone()
        matrix.diagonal(dim1=1, dim2=2).add_(systems.ridge.squeeze(1) / middle)
        # One layout in memory, whatever the size, so that rounding does not depend on what else is in a tile.
        inverse = spd_inverse(matrix).contiguous()
        # The last of the tokens sees all that come before it, and none of these has lost more of the state.
        write = systems.weights.diagonal(dim1=1, dim2=2).unsqueeze(-1)
        scale = torch.where(from_start >= lowest.unsqueeze(1), write / from_start, 0.0).sqrt_()
        keys_inverse = torch.bmm(systems.keys * scale, inverse)
        gram = torch.bmm(keys_inverse, systems.keys_transposed * scale.mT)
        gram.diagonal(dim1=1, dim2=2).add_(1.0)
        factor, _ = torch.linalg.cholesky_ex(gram)
        updates = torch.linalg.solve_triangular(factor, keys_inverse, upper=False).contiguous()
        return Preconditioner(inverse, updates, torch.where(tokens, from_start, 1.0))

    def select(self, index: Tensor) -> Preconditioner:
        """That of the problems at `index`."""
        return Preconditioner(*(tensor.index_select(0, index) for tensor in self))

    def without(self, problems: Tensor) -> Preconditioner:
        """The same map, but the identity for the marked problems [n]."""
        marked = problems.view(-1, 1, 1)
        identity = torch.eye(self.inverse.shape[-1], dtype=self.inverse.dtype, device=self.inverse.device)
        inverse, updates = torch.where(marked, identity, self.inverse), torch.where(marked, 0.0, self.updates)
        return Preconditioner(inverse, updates, torch.where(marked, 1.0, self.from_start))


class RidgeSystems:
    """The systems of n chunks, as the solver wants them; vectors are [n, C, K]."""

    def __init__(
        self,
        workspace: Workspace,
        kk: Tensor,
        keys: Tensor,
        keys_transposed: Tensor,
        weights: Tensor,
        from_start: Tensor,
        ridge: Tensor,
    ) -> None:
        """kk [n, K, K] is the state at the start; keys [n, C, K], and transposed; weights [n, C, C] zeta_ts write_s.

        from_start [n, C, 1], ridge [n, 1, K]. No two systems with the same workspace can be in use at the same time.
        """
        self.kk, self.keys, self.keys_transposed = kk, keys, keys_transposed
        self.weights, self.from_start, self.ridge = weights, from_start, ridge
        self._workspace = workspace
        self._scores = workspace.room("scores", *weights.shape)
        self._product = workspace.room("product", *keys.shape)
        self._direction = workspace.room("direction", *keys.shape)
        self._solution = workspace.room("solution", *keys.shape)
        self.use(None)

    def use(self, preconditioner: Preconditioner | None) -> None:
        """Go on with this preconditioner, or with none."""
        self.preconditioner = preconditioner
        if preconditioner is not None:
            # A product with a matrix that lies transposed in memory takes twice as long.
            self._updates_transposed = preconditioner.updates.mT.contiguous()

    def select(self, index: Tensor) -> RidgeSystems:
        """The systems of the problems at `index`, in memory of their own but for the room that they work in."""
        parts = (self.kk, self.keys, self.keys_transposed, self.weights, self.from_start, self.ridge)
        selected = RidgeSystems(self._workspace, *(part.index_select(0, index) for part in parts))
        if self.preconditioner is not None:
            selected.use(self.preconditioner.select(index))
        return selected

    def matvec(self, vector: Tensor) -> Tensor:
        """(H_t + ridge) vector_t for every token."""
        scores = torch.bmm(vector, self.keys_transposed, out=self._scores).mul_(self.weights)
        faded = torch.mul(vector, self.from_start, out=self._direction)
        product = torch.mul(vector, self.ridge, out=self._product)
        return product.baddbmm_(faded, self.kk).baddbmm_(scores, self.keys)

    def precondition(self, residual: Tensor) -> Tensor | None:
        """from_start_t times about (H_t + ridge)^-1 residual_t, or None for the plain method."""
        if self.preconditioner is None:
            return None
        scores = torch.bmm(residual, self._updates_transposed, out=self._scores).tril_()
        direction = torch.bmm(residual, self.preconditioner.inverse, out=self._direction)
        return direction.baddbmm_(scores, self.preconditioner.updates, alpha=-1)

    def start(self, rhs: Tensor) -> tuple[Tensor, Tensor]:
        """The paper's start value rhs / diag(H_t + ridge), or the preconditioner's answer where there is one."""
        answer = self.precondition(rhs)
        if answer is None or self.preconditioner is None:
            x = self._plain_start(rhs)
            return x, self.matvec(x)
        x = torch.div(answer, self.preconditioner.from_start, out=self._solution)
        product = self.matvec(x)
        # Rounding can spoil the inverse of an extremely ill-conditioned state; such a chunk goes on without.
        missed = torch.linalg.vector_norm(torch.sub(rhs, product, out=self._direction), dim=-1)
        length = torch.linalg.vector_norm(rhs, dim=-1)
        # A query that is no number says nothing about the inverse.
        sound = (missed.le(2 * length) | ~length.isfinite()).all(dim=-1)
        if not bool(sound.all()):
            self.use(self.preconditioner.without(~sound))
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
