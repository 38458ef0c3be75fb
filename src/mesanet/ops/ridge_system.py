"""The Mesa rule's systems (H_t + ridge) x_t = b_t for all the tokens of a few chunks, without forming any H_t.

Within a chunk that starts with the state H, token t sees

    A_t = from_start_t H + sum_{s <= t} zeta_ts write_s k_s k_s^T + diag(ridge),

so a product with A_t is one step of gated linear attention whose values are its keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mesanet.ops.spd_inverse import spd_inverse
from mesanet.ops.workspace import Workspace


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

    def __init__(self, inverse: Tensor, updates: Tensor) -> None:
        """inverse [n, K, K] is M_0, and updates [n, C, K] the rows u_s; an identity and zeros leave vectors alone."""
        # One layout in memory, wherever it comes from, so that rounding does not depend on what else is in a tile.
        self.inverse, self.updates = inverse.contiguous(), updates
        self.updates_transposed = updates.mT.contiguous()
        """[n, K, C] the same; a product with a matrix that lies transposed in memory takes twice as long."""

    @staticmethod
    def of_chunks(
        kk: Tensor,
        keys: Tensor,
        keys_transposed: Tensor,
        from_start: Tensor,
        write: Tensor,
        ridge: Tensor,
        wanted: Tensor,
    ) -> Preconditioner:
        """kk [n, K, K] is the state at the start; keys [n, C, K], and transposed; from_start and write [n, C].

        ridge [n, 1, K]; the map is the identity for problems that are not `wanted` [n].
        """
        every = bool(wanted.all())
        if not every:
            # They may forget all there is, which could not be divided by.
            from_start = torch.where(wanted.unsqueeze(-1), from_start, 1.0)
        chunk = from_start.shape[1]
        middle = from_start[:, (chunk - 1) // 2, None]
        matrix = kk.clone()
        matrix.diagonal(dim1=1, dim2=2).add_(ridge.squeeze(1) / middle)
        inverse = spd_inverse(matrix)
        scale = (write / from_start).sqrt_()
        keys_inverse = torch.bmm(keys * scale.unsqueeze(-1), inverse)
        gram = torch.bmm(keys_inverse, keys_transposed * scale.unsqueeze(1))
        gram.diagonal(dim1=1, dim2=2).add_(1.0)
        factor, _ = torch.linalg.cholesky_ex(gram)
        updates = torch.linalg.solve_triangular(factor, keys_inverse, upper=False).contiguous()
        whole = Preconditioner(inverse, updates)
        return whole if every else whole.without(~wanted)

    def without(self, problems: Tensor) -> Preconditioner:
        """The same map, but the identity for the marked problems [n]."""
        marked = problems.view(-1, 1, 1)
        identity = torch.eye(self.inverse.shape[-1], dtype=self.inverse.dtype, device=self.inverse.device)
        return Preconditioner(torch.where(marked, identity, self.inverse), torch.where(marked, 0.0, self.updates))

    def pack(self, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """What is worth keeping: inverse and updates of the `wanted` problems."""
        if bool(wanted.all()):
            return self.inverse, self.updates
        return self.inverse[wanted], self.updates[wanted]

    @staticmethod
    def unpack(inverse: Tensor, updates: Tensor, wanted: Tensor) -> Preconditioner:
        """What `pack` has packed."""
        if inverse.shape[0] < wanted.shape[0]:
            identity = torch.eye(inverse.shape[-1], dtype=inverse.dtype, device=inverse.device)
            whole_inverse = identity.repeat(wanted.shape[0], 1, 1)
            whole_updates = updates.new_zeros(wanted.shape[0], *updates.shape[1:])
            whole_inverse[wanted], whole_updates[wanted] = inverse, updates
            inverse, updates = whole_inverse, whole_updates
        return Preconditioner(inverse, updates)


class RidgeSystems:
    """The systems of n chunks, as the solver wants them; vectors are [n, C, K]."""

    def __init__(
        self,
        kk: Tensor,
        keys: Tensor,
        keys_transposed: Tensor,
        weights: Tensor,
        from_start: Tensor,
        ridge: Tensor,
        workspace: Workspace,
        preconditioner: Preconditioner | None,
    ) -> None:
        """kk [n, K, K] is the state at the start; keys [n, C, K], and transposed; weights [n, C, C] zeta_ts write_s.

        from_start [n, C], ridge [n, 1, K]. No two systems with the same workspace can be in use at the same time.
        """
        self.kk, self.keys, self.keys_transposed = kk, keys, keys_transposed
        self.weights, self.from_start, self.ridge = weights, from_start.unsqueeze(-1), ridge
        self.preconditioner = preconditioner
        self._scores = workspace.room("scores", *weights.shape)
        self._product = workspace.room("product", *keys.shape)
        self._direction = workspace.room("direction", *keys.shape)
        self._solution = workspace.room("solution", *keys.shape)

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
        scores = torch.bmm(residual, self.preconditioner.updates_transposed, out=self._scores).tril_()
        direction = torch.bmm(residual, self.preconditioner.inverse, out=self._direction)
        return direction.baddbmm_(scores, self.preconditioner.updates, alpha=-1)

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
        length = torch.linalg.vector_norm(rhs, dim=-1)
        # A query that is no number says nothing about the inverse.
        sound = (missed.le(2 * length) | ~length.isfinite()).all(dim=-1)
        if not bool(sound.all()):
            self.preconditioner = self.preconditioner.without(~sound)
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
