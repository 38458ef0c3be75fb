"""What the problems of a tile are made of: keys, values, gates, and the states at the start of every chunk.

The states are carried through a tile when it is worked on, in its cache, from the one at its start. So only one state
a tile is ever kept, and the backward pass computes the others again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mesanet.ops.chunks import ChunkLayout, Segment
from mesanet.ops.decay import ChunkDecay, chunk_decay
from mesanet.ops.mesa_tiles import Tile
from mesanet.ops.ridge_system import Preconditioner, RidgeSystems
from mesanet.ops.solver import ConjugateGradient, Solution, solve
from mesanet.ops.state import MesaState
from mesanet.ops.workspace import Workspace

LEVEL = 0.25
"""Tokens at which between LEVEL^(i + 1) and LEVEL^i of the chunk's first state is left are on level i."""
LEVELS = 4
"""Below the last of these levels little enough is left to converge fast without a preconditioner."""
STIFF = 256.0
"""A level gets a preconditioner where the bound of a condition number reaches this."""


class Slow(NamedTuple):
    """Where preconditioners are worth it: pairs of a problem and a level of tokens in it."""

    problems: Tensor
    """[m] int64"""
    tokens: Tensor
    """[m, C, 1] bool"""


@dataclass(frozen=True, kw_only=True)
class Problems:
    """The n problems of a tile."""

    keys: Tensor
    """[n, C, K]"""
    keys_transposed: Tensor
    """[n, K, C] the same; a product with a matrix that lies transposed in memory takes twice as long."""
    values: Tensor
    """[n, C, V]"""
    states: MesaState
    """[n, K, K] and [n, K, V] at the start of each chunk."""
    after: MesaState
    """[h * r, ...] after the last chunk."""
    decay: ChunkDecay
    write: Tensor
    """[n, C]"""
    weights: Tensor
    """[n, C, C] how much of token s counts at token t: zeta_ts write_s."""
    ridge: Tensor
    """[n, 1, K]"""
    workspace: Workspace

    @property
    def from_start(self) -> Tensor:
        """[n, C, 1] what is left at token t of the state at the start of its chunk."""
        return self.decay.from_start.unsqueeze(-1)

    def systems(self) -> RidgeSystems:
        """The systems (H_t + ridge) x = b of all the tokens."""
        return RidgeSystems(
            self.workspace,
            self.states.kk,
            self.keys,
            self.keys_transposed,
            self.weights,
            self.from_start,
            self.ridge,
        )

    def slow(self) -> Slow | None:
        """What is worth a preconditioner, or None: stiff levels, and chunks that are on the first level to their end.

        The trace of H_t over the ridge bounds the condition number, up to one. Chunks that forget more than a level
        converge fast without, but for those that begin stiff and that a strong gate then wipes out.
        """
        lengths = torch.linalg.vecdot(self.keys, self.keys).unsqueeze(-1)
        state = self.states.kk.diagonal(dim1=1, dim2=2).sum(-1).view(-1, 1, 1)
        trace = (self.weights @ lengths).addcmul_(self.from_start, state)
        level = (self.decay.from_start.log() / math.log(LEVEL)).floor().unsqueeze(1)
        levels = level == torch.arange(LEVELS, dtype=level.dtype, device=level.device).view(1, -1, 1)
        stiff = (trace >= STIFF * self.ridge.amin(-1, keepdim=True)).mT
        worth = (levels & stiff).any(dim=-1)
        worth[:, 0] |= levels[:, 0, -1]
        problems, own_level = worth.nonzero().unbind(1)
        return Slow(problems, levels[problems, own_level].unsqueeze(-1)) if len(problems) > 0 else None

    def solve(
        self, rhs: Tensor, solver: ConjugateGradient, slow: Slow | None, preconditioner: Preconditioner | None
    ) -> tuple[Solution, Preconditioner | None]:
        """Solve for `rhs` [n, C, K], which is used up; the solution lies in the workspace.

        The tokens that are `slow` are solved with a preconditioner, made here unless it is given, which is returned
        too. The others are solved apart from them, so that each method is only paid for where it is used.
        """
        systems, workspace = self.systems(), self.workspace
        if slow is None:
            return solve(systems, rhs, solver, workspace), None
        if len(slow.problems) == len(rhs) and bool(slow.tokens.all()):
            systems.use(Preconditioner.of(systems, slow.tokens) if preconditioner is None else preconditioner)
            return solve(systems, rhs, solver, workspace), systems.preconditioner

        fast = torch.ones_like(self.from_start).index_add_(0, slow.problems, slow.tokens.to(rhs.dtype), alpha=-1) > 0
        some = fast.flatten(1).any(dim=1).nonzero().squeeze(1)
        value = workspace.room("value", *rhs.shape).zero_()
        steps, residual = rhs.new_zeros(rhs.shape[:-1], dtype=torch.int32), rhs.new_zeros(rhs.shape[:-1])
        for problems, tokens in ((some, fast[some]), slow):
            part = systems.select(problems)
            if problems is slow.problems:
                part.use(Preconditioner.of(part, tokens) if preconditioner is None else preconditioner)
            # Nothing is asked at the other tokens, whose answer is zero then.
            own = solve(part, torch.where(tokens, rhs.index_select(0, problems), 0.0), solver, workspace)
            value.index_add_(0, problems, own.value)
            steps.index_add_(0, problems, own.steps * tokens.squeeze(-1))
            residual.index_add_(0, problems, own.residual)
        return Solution(value, steps, residual), part.preconditioner


@dataclass(frozen=True, kw_only=True)
class MesaChunks:
    """The inputs of the rule cut into chunks: views of what the caller gave, but for the gates."""

    keys: Tensor
    """[N, H, R, C, K]"""
    values: Tensor
    """[N, H, R, C, V]"""
    log_decay: Tensor
    """[N, H, R, C]"""
    write: Tensor
    """[N, H, R, C]"""
    sign: Tensor | None
    """[N, H, R, C]"""
    ridge: Tensor
    """[H, K]"""
    initial: MesaState
    """[S, H, ...] at the start of each sequence."""
    segments: tuple[Segment, ...]
    """[N] the run of chunks that each chunk belongs to."""

    @staticmethod
    def cut(
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        write: Tensor,
        ridge: Tensor,
        sign: Tensor | None,
        state: MesaState,
        layout: ChunkLayout,
    ) -> MesaChunks:
        """Cut the inputs [B, T, H, ...]."""
        dtype = state.kk.dtype

        def gates(tensor: Tensor) -> Tensor:
            return layout.split(tensor, dtype).movedim(0, 2).movedim(1, 0).contiguous()

        return MesaChunks(
            keys=chunks_first(layout, layout.pad(k)),
            values=chunks_first(layout, layout.pad(v)),
            log_decay=gates(log_decay),
            write=gates(write),
            # A sign of zero, as padding would be, would wipe out the state.
            sign=None if sign is None else gates(sign - 1) + 1,
            ridge=ridge.to(dtype),
            initial=state,
            segments=tuple(segment for _, segment in layout.forwards()),
        )

    def sequences(self, tile: Tile, chunk: int) -> slice:
        """Which rows of the state belong to the tile's rows at a chunk."""
        return self.segments[chunk].sequences if self.keys.shape[2] == 1 else tile.rows

    def load(self, tile: Tile, start: MesaState | None, workspace: Workspace, final: MesaState | None) -> Problems:
        """The problems of a tile that goes on from the state `start` [h * r, ...], where no sequence begins with it.

        The states after the sequences that end in the tile are written to `final` [S, H, ...], if given.
        """
        room = workspace.room
        chunks, heads, rows = tile.grid
        size, width = self.keys.shape[-1], self.values.shape[-1]
        write, log_decay = tile.take(self.write), tile.take(self.log_decay)
        sign = None if self.sign is None else tile.take(self.sign)
        count, chunk = write.shape
        keys = tile.gather(self.keys, room("keys", count, chunk, size))
        values = tile.gather(self.values, room("values", count, chunk, width))
        decay = chunk_decay(log_decay, sign, room("within", count, chunk, chunk))
        states = MesaState(
            room("kk", chunks + 1, heads * rows, size, size), room("kv", chunks + 1, heads * rows, size, width)
        )
        lasting = torch.mul(keys, (decay.to_end * write).unsqueeze(-1), out=room("product", count, chunk, size))
        self._carry(tile, start, states, lasting, keys, values, decay.from_start[:, -1], final)
        return Problems(
            keys=keys,
            keys_transposed=room("keys_transposed", count, size, chunk).copy_(keys.mT),
            values=values,
            states=MesaState(states.kk[:-1].flatten(0, 1), states.kv[:-1].flatten(0, 1)),
            after=MesaState(states.kk[-1], states.kv[-1]),
            decay=decay,
            write=write,
            weights=torch.mul(decay.within, write.unsqueeze(1), out=room("weights", count, chunk, chunk)),
            ridge=tile.spread(self.ridge),
            workspace=workspace,
        )

    def _carry(
        self,
        tile: Tile,
        start: MesaState | None,
        states: MesaState,
        lasting: Tensor,
        keys: Tensor,
        values: Tensor,
        total: Tensor,
        final: MesaState | None,
    ) -> None:
        """Fill in the states [G + 1, h * r, ...]: what each chunk adds, all at once, and then their decayed sums."""
        chunks, heads, rows = tile.grid
        kept = total.view(chunks, heads * rows, 1, 1).unbind()
        for index, (state, right) in enumerate(zip(states, (keys, values), strict=True)):
            boundaries = state.unbind()
            if start is not None:
                # First, since it may lie in the room that is filled next.
                boundaries[0].copy_(start[index])
            torch.bmm(lasting.mT, right, out=state[1:].flatten(0, 1))
            for place, chunk in enumerate(range(tile.chunks.start, tile.chunks.stop)):
                segment = self.segments[chunk]
                if chunk == segment.begin:
                    initial = tile.read_states(self.initial[index], self.sequences(tile, chunk))
                    boundaries[place].unflatten(0, (heads, rows)).copy_(initial)
                boundaries[place + 1].addcmul_(boundaries[place], kept[place])
                if final is not None and chunk + 1 == segment.end:
                    tile.write_states(final[index], self.sequences(tile, chunk), boundaries[place + 1])


def chunks_first(layout: ChunkLayout, tensor: Tensor) -> Tensor:
    """[R, N * C, H, X] as [N, H, R, C, X], sharing its memory."""
    return layout.view(tensor).movedim(0, 2).movedim(1, 0)
