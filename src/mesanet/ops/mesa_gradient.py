"""The backward pass of the Mesa rule.

With x_t = (H_t + ridge)^-1 q_t the solved query, e_t the error that comes in at token t, and e*_t the second solve,

    e*_t = (H_t + ridge)^-1 G_t^T e_t,        dL/dq_t = e*_t,        dL/dridge = -sum_t e*_t x_t,

a token s reaches the loss through every later read-out t, with weight zeta_ts:

    dL/dv_s     = write_s sum_t zeta_ts e_t (x_t . k_s)
    dL/dk_s     = write_s sum_t zeta_ts (x_t (e_t . v_s) - e*_t (x_t . k_s) - x_t (e*_t . k_s))
    dL/dwrite_s =         sum_t zeta_ts (x_t . k_s) (e_t . v_s - e*_t . k_s).

What later chunks add to these sums arrives as the gradient for the state at the end of the chunk, which is carried
from chunk to chunk against the order of time, a tile at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mesanet.ops.blocks import crossing
from mesanet.ops.chunks import ChunkLayout
from mesanet.ops.mesa_problems import MesaChunks, Problems, Slow, chunks_first
from mesanet.ops.mesa_tiles import Tile
from mesanet.ops.ridge_system import Preconditioner
from mesanet.ops.solver import ConjugateGradient
from mesanet.ops.state import MesaState
from mesanet.ops.workspace import Workspace


@dataclass(frozen=True, kw_only=True)
class MesaGradients:
    """The gradients of all inputs, filled in tile by tile."""

    chunks: MesaChunks
    layout: ChunkLayout
    workspace: Workspace
    errors: Tensor
    """[N, H, R, C, V] the gradient for the output."""
    final: MesaState
    """[S, H, ...] the gradient for the state after the last token."""
    queries: Tensor
    """[R, N * C, H, K]"""
    keys: Tensor
    """[R, N * C, H, K]"""
    values: Tensor
    """[R, N * C, H, V]"""
    log_decay: Tensor
    """[N, H, R, C]"""
    write: Tensor
    """[N, H, R, C]"""
    ridge: Tensor
    """[H, K]"""
    initial: MesaState
    """[S, H, ...]"""

    @staticmethod
    def begin(
        chunks: MesaChunks,
        layout: ChunkLayout,
        grad_output: Tensor,
        final: MesaState,
        workspace: Workspace,
    ) -> MesaGradients:
        """Room for the gradients; a sequence without tokens passes on what arrives for its state."""
        like, time = final.kk, layout.chunks * layout.chunk
        heads, key, value = final.kv.shape[1:]
        return MesaGradients(
            chunks=chunks,
            layout=layout,
            workspace=workspace,
            errors=chunks_first(layout, layout.pad(grad_output)),
            final=final,
            queries=like.new_empty(layout.batch, time, heads, key),
            keys=like.new_empty(layout.batch, time, heads, key),
            values=like.new_empty(layout.batch, time, heads, value),
            log_decay=torch.empty_like(chunks.log_decay),
            write=torch.empty_like(chunks.write),
            ridge=torch.zeros_like(chunks.ridge),
            initial=MesaState(final.kk.clone(), final.kv.clone()),
        )

    def merged(self, dtypes: list[torch.dtype]) -> Iterator[Tensor]:
        """The gradients in the shapes of the inputs, and in these dtypes."""
        layout = self.layout
        gates = (gate.movedim(2, 0).movedim(1, 2) for gate in (self.log_decay, self.write))
        tokens = (layout.unpad(tensor) for tensor in (self.queries, self.keys, self.values))
        merged = (layout.merge(gate, gate.dtype) for gate in gates)
        for gradient, dtype in zip((*tokens, *merged, self.ridge, *self.initial), dtypes, strict=True):
            yield gradient.to(dtype)

    def load_errors(self, tile: Tile, problems: Problems) -> Tensor:
        """The gradient for the output [n, C, V] of a tile."""
        return tile.gather(self.errors, self.workspace.room("e", *problems.values.shape))

    def add(self, tile: Tile, work: TileErrors, e_star: Tensor, owed: Tensor, carried: MesaState | None) -> MesaState:
        """Add what a tile has to say, given its solved errors `e_star` [n, C, K] and what they owe [n, C].

        `carried` [h * r, ...] is what the tile after it in time returned: the gradient for the state between them.
        """
        room, layout, problems = self.workspace.room, self.layout, work.problems
        tile.scatter(chunks_first(layout, self.queries), e_star)
        heads, rows = tile.grid[1:]
        ridge = work.grad_ridge(e_star).unflatten(0, tile.grid).sum((0, 2))
        self.ridge[list(tile.heads)] += ridge

        chunks, size, width = tile.grid[0], problems.keys.shape[-1], problems.values.shape[-1]
        arriving = MesaState(
            room("grad kk", chunks + 1, heads * rows, size, size),
            room("grad kv", chunks + 1, heads * rows, size, width),
        )
        self._carry(tile, work, e_star, arriving, carried)
        at_end = MesaState(arriving.kk[1:].flatten(0, 1), arriving.kv[1:].flatten(0, 1))
        keys, values, log_decay, write = work.gradients(e_star, owed, at_end)
        tile.scatter(chunks_first(layout, self.keys), keys)
        tile.scatter(chunks_first(layout, self.values), values)
        tile.put(self.log_decay, log_decay)
        tile.put(self.write, write)
        return MesaState(arriving.kk[0], arriving.kv[0])

    def _carry(
        self, tile: Tile, work: TileErrors, e_star: Tensor, arriving: MesaState, carried: MesaState | None
    ) -> None:
        """Fill in what arrives at the boundaries of chunks [G + 1, h * r, ...] from all later tokens."""
        chunks, heads, rows = tile.grid
        x, decay = work.x, work.problems.decay
        seen = torch.mul(x, decay.from_start.unsqueeze(-1), out=self.workspace.room("product", *x.shape)).mT
        kept = decay.from_start[:, -1].view(chunks, heads * rows, 1, 1).unbind()
        for index, (state, right, sign) in enumerate(((arriving.kk, e_star, -1), (arriving.kv, work.e, 1))):
            boundaries = state.unbind()
            if carried is not None:
                # First, since it may lie in the room that is filled next.
                boundaries[chunks].copy_(carried[index])
            torch.bmm(seen, right, out=state[:-1].flatten(0, 1)).mul_(sign)
            for place in reversed(range(chunks)):
                chunk = tile.chunks.start + place
                segment, sequences = self.chunks.segments[chunk], self.chunks.sequences(tile, chunk)
                if chunk + 1 == segment.end:
                    final = tile.read_states(self.final[index], sequences)
                    boundaries[place + 1].unflatten(0, (heads, rows)).copy_(final)
                boundaries[place].addcmul_(boundaries[place + 1], kept[place])
                if chunk == segment.begin:
                    tile.write_states(self.initial[index], sequences, boundaries[place])


class TileErrors:
    """The second solve of a tile: its problems with their solved queries x [n, C, K] and errors e [n, C, V]."""

    def __init__(self, problems: Problems, x: Tensor, e: Tensor) -> None:
        self.problems, self.x, self.e = problems, x, e
        room, values = problems.workspace.room, problems.values
        # Products with a matrix that lies transposed in memory take twice as long.
        values_transposed = room("values transposed", *values.mT.shape).copy_(values.mT)
        self.overlaps = torch.bmm(e, values_transposed, out=room("overlaps", *problems.weights.shape))
        """[n, C, C] e_t . v_s"""

    def solve(
        self, solver: ConjugateGradient, slow: Slow | None, preconditioner: Preconditioner | None
    ) -> tuple[Tensor, Tensor]:
        """e* [n, C, K], and what each token's loss owes to the state at the start of its chunk [n, C]."""
        problems, from_start, x = self.problems, self.problems.from_start, self.x
        room = problems.workspace.room
        through_state = torch.bmm(self.e, problems.states.kv.mT, out=room("through state", *x.shape))
        rhs = torch.mul(through_state, from_start, out=room("rhs", *x.shape))
        scores = torch.mul(self.overlaps, problems.weights, out=room("scores", *self.overlaps.shape))
        e_star = problems.solve(rhs.baddbmm_(scores, problems.keys), solver, slow, preconditioner)[0].value
        through_state.baddbmm_(e_star, problems.states.kk, alpha=-1)
        owed = through_state.mul_(x).sum(-1).mul_(from_start.squeeze(-1))
        return e_star, owed

    def grad_ridge(self, e_star: Tensor) -> Tensor:
        """[n, K]"""
        return torch.mul(self.x, e_star, out=self.problems.workspace.room("product", *self.x.shape)).sum(1).neg_()

    def gradients(self, e_star: Tensor, owed: Tensor, at_end: MesaState) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of keys, values, log decays and write gates; `at_end` arrives for the state at the end of each chunk."""
        problems, decay = self.problems, self.problems.decay
        room, square = problems.workspace.room, problems.weights.shape
        keys, values, within, write = problems.keys, problems.values, decay.within, problems.write
        end, weight = decay.to_end.unsqueeze(-1), write.unsqueeze(-1)

        x_keys = torch.bmm(self.x, problems.keys_transposed, out=room("scores", *square))
        misses = self.overlaps.baddbmm_(e_star, problems.keys_transposed, alpha=-1).mul_(within)
        pairs = torch.mul(x_keys, misses, out=room("pairs", *square))
        x_keys *= within
        grad_values = torch.bmm(keys, at_end.kv, out=room("output", *values.shape)).mul_(end)
        grad_values.baddbmm_(x_keys.mT, self.e)
        grad_keys = torch.bmm(values, at_end.kv.mT, out=room("direction", *keys.shape)).baddbmm_(keys, at_end.kk)
        given = torch.mul(keys, grad_keys, out=room("product", *keys.shape)).sum(-1).mul_(decay.to_end)
        grad_keys.baddbmm_(keys, at_end.kk.mT).mul_(end)
        grad_keys.baddbmm_(misses.mT, self.x).baddbmm_(x_keys.mT, e_star, alpha=-1)

        grad_write = pairs.sum(1).add_(given)
        through = sum(
            torch.mul(state, later, out=room("through", *state.shape)).sum((1, 2))
            for state, later in zip(problems.states, at_end, strict=True)
        )
        through = through * decay.from_start[:, -1]
        grad_log_decay = crossing(pairs.mul_(write.unsqueeze(1)), owed, given * write, through)
        return grad_keys.mul_(weight), grad_values.mul_(weight), grad_log_decay, grad_write
