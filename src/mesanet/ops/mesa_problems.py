"""What the problems of a tile are made of: keys, values, gates, and the states at the start of every chunk.

The states are carried through a tile when it is worked on, in its cache, from the one at its start. So only one state
a tile is ever kept, and the backward pass computes the others again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mesanet.ops.chunks import ChunkLayout, Segment
from mesanet.ops.decay import ChunkDecay, chunk_decay
from mesanet.ops.mesa_tiles import Tile
from mesanet.ops.ridge_system import Preconditioner, RidgeSystems
from mesanet.ops.state import MesaState
from mesanet.ops.workspace import Workspace


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

    def preconditioner(self, wanted: Tensor | None) -> Preconditioner | None:
        """One for the problems that are `wanted` [n], or None if none is."""
        if wanted is None:
            return None
        return Preconditioner.of_chunks(
            self.states.kk, self.keys, self.keys_transposed, self.decay.from_start, self.write, self.ridge, wanted
        )

    def systems(self, preconditioner: Preconditioner | None) -> RidgeSystems:
        """The systems (H_t + ridge) x = b of all the tokens."""
        return RidgeSystems(
            self.states.kk,
            self.keys,
            self.keys_transposed,
            self.weights,
            self.decay.from_start,
            self.ridge,
            self.workspace,
            preconditioner,
        )


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
