"""The two halves of the Mesa rule's backward pass.

With x_t = (H_t + ridge)^-1 q_t the solved query, e_t the error that comes in at token t, and e*_t the second solve,

    e*_t = (H_t + ridge)^-1 G_t^T e_t,        dL/dq_t = e*_t,        dL/dridge = -sum_t e*_t x_t,

a token s reaches the loss through every later read-out t, with weight zeta_ts:

    dL/dv_s     = write_s sum_t zeta_ts e_t (x_t . k_s)
    dL/dk_s     = write_s sum_t zeta_ts (x_t (e_t . v_s) - e*_t (x_t . k_s) - x_t (e*_t . k_s))
    dL/dwrite_s =         sum_t zeta_ts (x_t . k_s) (e_t . v_s - e*_t . k_s).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mesanet.ops.blocks import crossing
from mesanet.ops.chunks import ChunkLayout
from mesanet.ops.decay import ChunkDecay, chunk_decay
from mesanet.ops.mesa_tiles import MesaChunks, Tile
from mesanet.ops.ridge_system import RidgeSystems
from mesanet.ops.solver import ConjugateGradient, solve
from mesanet.ops.state import MesaState
from mesanet.ops.workspace import Workspace


class InputGradients(NamedTuple):
    """What `spread_errors` returns."""

    keys: Tensor
    """[R, N * C, H, K]"""
    values: Tensor
    """[R, N * C, H, V]"""
    log_decay: Tensor
    """[R, H, N, C]"""
    write: Tensor
    """[R, H, N, C]"""
    state: MesaState
    """For the initial state."""


def solve_errors(
    systems: RidgeSystems, chunks: MesaChunks, tile: Tile, errors: Tensor, solved: Tensor, solver: ConjugateGradient
) -> tuple[Tensor, Tensor, Tensor]:
    """The second solve for a tile.

    Returns e* [n, C, K], what each token's loss owes to the state at the start of its chunk [n, C], and the gradient
    for the ridge [n, K]. `errors` are [R, H, N, C, V], `solved` [P, C, K].
    """
    room = tile.workspace.room
    kv, x = tile.take(chunks.kv, "kv"), tile.take(solved, "x")
    error, values = tile.gather(errors, "error"), tile.gather(chunks.values, "values")
    through_state = torch.bmm(error, kv.mT, out=room("through_state", *x.shape))
    scores = torch.bmm(error, values.mT, out=room("scores", *systems.weights.shape)).mul_(systems.weights)
    rhs = torch.mul(through_state, systems.from_start, out=room("rhs", *x.shape)).baddbmm_(scores, systems.keys)
    e_star = solve(systems, rhs, solver, tile.workspace).value
    through_state.baddbmm_(e_star, systems.kk, alpha=-1)
    owed = through_state.mul_(x).sum(-1).mul_(systems.from_start.squeeze(-1))
    grad_ridge = torch.mul(x, e_star, out=through_state).sum(1).neg_()
    return e_star, owed, grad_ridge


def spread_errors(
    chunks: MesaChunks,
    layout: ChunkLayout,
    errors: Tensor,
    solved: Tensor,
    solved_errors: Tensor,
    owed: Tensor,
    arriving: MesaState,
) -> InputGradients:
    """Gradients of everything but the queries and the ridge, chunk by chunk against the order of time.

    `errors` [R, H, N, C, V] come in at the output, `arriving` [S, H, ...] at the state after the last token; `solved`
    [P, C, K], `solved_errors` [R, H, N, C, K] and `owed` [P, C] are what `solve_errors` takes and gives. What reaches
    the end of a chunk from later tokens is carried along, so no more than one chunk of it is ever held.
    """
    rows, heads, count = chunks.grid
    time, dtype, device = count * layout.chunk, solved.dtype, solved.device
    padded_keys = torch.empty(rows, time, heads, solved.shape[-1], dtype=dtype, device=device)
    padded_values = torch.empty(rows, time, heads, errors.shape[-1], dtype=dtype, device=device)
    grad_keys, grad_values = layout.view(padded_keys), layout.view(padded_values)
    grad_log_decay = torch.empty(chunks.write.shape, dtype=dtype, device=device).unflatten(0, chunks.grid)
    grad_write = torch.empty_like(grad_log_decay)
    initial = MesaState(arriving.kk.clone(), arriving.kv.clone())
    workspace = Workspace(dtype, device)
    x, owed = solved.unflatten(0, chunks.grid), owed.unflatten(0, chunks.grid)
    for block in _blocks(rows, heads, chunks.problems_at_once()):
        for chunk, segment in layout.backwards():
            sequences = (segment.sequences if rows == 1 else block[0], block[1])
            if chunk == segment.end - 1:
                later = MesaState(*(tensor[sequences].flatten(0, 1).clone() for tensor in arriving))
            here = (*block, chunk)
            piece = _ChunkErrors.gather(chunks, here, x, errors, solved_errors, owed, workspace)
            for grad, own in zip(
                (grad_keys, grad_values, grad_log_decay, grad_write), piece.gradients(later), strict=True
            ):
                grad[here] = own.view(grad[here].shape)
            piece.carry(later)
            if chunk == segment.begin:
                for whole, own in zip(initial, later, strict=True):
                    whole[sequences] = own.view(whole[sequences].shape)
    return InputGradients(padded_keys, padded_values, grad_log_decay, grad_write, initial)


def _blocks(rows: int, heads: int, fitting: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of rows and heads that together cover all of them, of about `fitting` each."""
    row_count, head_count = max(1, fitting // max(1, heads)), min(heads, fitting)
    for row in range(0, rows, row_count):
        for head in range(0, heads, head_count):
            yield slice(row, min(rows, row + row_count)), slice(head, min(heads, head + head_count))


class _ChunkErrors(NamedTuple):
    """All that the gradients of n problems, one chunk of as many rows and heads, depend on."""

    bank: Tensor
    kv: Tensor
    values: Tensor
    write: Tensor
    decay: ChunkDecay
    x: Tensor
    e: Tensor
    e_star: Tensor
    owed: Tensor
    workspace: Workspace

    @staticmethod
    def gather(
        chunks: MesaChunks,
        here: tuple[slice, slice, int],
        x: Tensor,
        errors: Tensor,
        solved_errors: Tensor,
        owed: Tensor,
        workspace: Workspace,
    ) -> _ChunkErrors:
        """The problems of a block of rows and heads at one chunk; the big tensors are [R, H, N, ...]."""
        bank, kv, write, log_decay = (
            tensor.unflatten(0, chunks.grid)[here].flatten(0, 1)
            for tensor in (chunks.bank, chunks.kv, chunks.write, chunks.log_decay)
        )
        sign = None if chunks.sign is None else chunks.sign.unflatten(0, chunks.grid)[here].flatten(0, 1)
        problems, chunk = write.shape

        def copied(name: str, view: Tensor) -> Tensor:
            source = view[here]
            return workspace.room(name, *source.shape).copy_(source).flatten(0, 1)

        return _ChunkErrors(
            bank=bank,
            kv=kv,
            values=copied("values", chunks.values),
            write=write,
            decay=chunk_decay(log_decay, sign, workspace.room("within", problems, chunk, chunk)),
            x=x[here].flatten(0, 1),
            e=copied("e", errors),
            e_star=copied("e_star", solved_errors),
            owed=owed[here].flatten(0, 1),
            workspace=workspace,
        )

    def gradients(self, later: MesaState) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of keys, values, log decays and write gates; `later` is what arrives at the end of the chunk."""
        room, size = self.workspace.room, self.bank.shape[-1]
        keys, within, square = self.bank[:, size:], self.decay.within, self.decay.within.shape
        end, weight = self.decay.to_end.unsqueeze(-1), self.write.unsqueeze(-1)

        x_keys = torch.bmm(self.x, keys.mT, out=room("x_keys", *square))
        misses = torch.bmm(self.e, self.values.mT, out=room("misses", *square))
        misses.baddbmm_(self.e_star, keys.mT, alpha=-1).mul_(within)
        pairs = torch.mul(x_keys, misses, out=room("pairs", *square))
        x_keys *= within
        grad_values = torch.bmm(keys, later.kv, out=room("grad_values", *self.values.shape)).mul_(end)
        grad_values.baddbmm_(x_keys.mT, self.e)
        grad_keys = torch.bmm(self.values, later.kv.mT, out=room("grad_keys", *keys.shape)).baddbmm_(keys, later.kk.mT)
        given = torch.mul(keys, grad_keys, out=room("given", *keys.shape)).sum(-1).mul_(self.decay.to_end)
        grad_keys.baddbmm_(keys, later.kk).mul_(end)
        grad_keys.baddbmm_(misses.mT, self.x).baddbmm_(x_keys.mT, self.e_star, alpha=-1)

        grad_write = pairs.sum(1).add_(given)
        kk = self.bank.flatten(1)[:, : size * size]
        through = _dot(self.kv.flatten(1), later.kv.flatten(1)) + _dot(kk, later.kk.flatten(1))
        through *= self.decay.from_start[:, -1]
        grad_log_decay = crossing(pairs.mul_(self.write.unsqueeze(1)), self.owed, given * self.write, through)
        return grad_keys.mul_(weight), grad_values.mul_(weight), grad_log_decay, grad_write

    def carry(self, later: MesaState) -> None:
        """Turn what arrives at the end of the chunk into what arrives at its start, in place."""
        total = self.decay.from_start[:, -1, None, None]
        seen = torch.mul(
            self.x, self.decay.from_start.unsqueeze(-1), out=self.workspace.room("given", *self.x.shape)
        ).mT
        later.kv.mul_(total).baddbmm_(seen, self.e)
        later.kk.mul_(total).baddbmm_(seen, self.e_star, alpha=-1)


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """The inner product of each row: [n, X], [n, X] -> [n]; as a matrix product, which needs no room."""
    return torch.bmm(left.unsqueeze(1), right.unsqueeze(-1)).flatten()
