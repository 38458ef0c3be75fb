"""The chunks of a Mesa layer as problems of one chunk each, and the tiles in which they are worked through.

A tile is a handful of (row, head, chunk) problems that stays in cache for all of its solver steps. Chunks that forget
slowly, and so need a preconditioner, are in tiles of their own, and heads are sorted by how much they keep, so that the
tokens of a tile need about the same number of steps: a tile goes on until its last token has converged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mesanet.ops.chunks import ChunkLayout
from mesanet.ops.decay import chunk_decay, decay_from_start, decay_to_end, scan_states
from mesanet.ops.ridge_system import SLOW, Preconditioner, RidgeSystems
from mesanet.ops.solver import ConjugateGradient
from mesanet.ops.state import MesaState
from mesanet.ops.workspace import Workspace

CPU_TILE_BYTES = 16 << 20
"""Working set of a tile on a CPU: half of a usual third-level cache."""
DEVICE_TILE_BYTES = 1 << 30
"""Working set of a tile elsewhere: enough problems to fill a GPU."""


class Run(NamedTuple):
    """Neighbouring chunks of one row and head."""

    inside: slice
    """Where they stand in the tile."""
    row: int
    head: int
    chunks: slice


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Some of the problems, and the room to work on them."""

    index: Tensor
    """[n] which of the P problems."""
    where: slice | Tensor
    """The same, as a slice if they stand side by side, so that nothing need be copied."""
    cell: tuple[Tensor, Tensor, Tensor]
    """[n] each: the row, head and chunk of each problem."""
    runs: list[Run]
    """The same, as runs of neighbours, if these are few: copying whole runs is faster than copying by index."""
    slow: bool
    """Whether they get a preconditioner."""
    workspace: Workspace
    """Shared by all tiles, one at a time."""

    def take(self, tensor: Tensor, name: str) -> Tensor:
        """These problems of a tensor [P, ...]: a view, or a copy in the room of that name."""
        if isinstance(self.where, slice):
            return tensor[self.where]
        room = self.workspace.room(name, len(self.index), *tensor.shape[1:])
        return torch.index_select(tensor, 0, self.index, out=room)

    def gather(self, view: Tensor, name: str) -> Tensor:
        """These problems of a view [R, H, N, ...] of any dtype, copied to the room of that name."""
        room = self.workspace.room(name, len(self.index), *view.shape[3:])
        if not self.runs:
            return room.copy_(view[self.cell])
        for inside, row, head, chunks in self.runs:
            room[inside] = view[row, head, chunks]
        return room

    def scatter(self, view: Tensor, value: Tensor) -> None:
        """Write these problems of a view [R, H, N, ...] of any dtype."""
        if not self.runs:
            view[self.cell] = value.to(view.dtype)
        for inside, row, head, chunks in self.runs:
            view[row, head, chunks] = value[inside]


@dataclass(frozen=True, kw_only=True)
class MesaChunks:
    """The inputs of the rule cut into P = R * H * N problems, and the states at the start of each.

    All but the values are in the solver's dtype.
    """

    bank: Tensor
    """[P, K + C, K] the state H at the start of the chunk above the keys of its tokens."""
    kv: Tensor
    """[P, K, V] the state G transposed."""
    values: Tensor
    """[R, H, N, C, V] a view of what the caller gave."""
    log_decay: Tensor
    """[P, C]"""
    write: Tensor
    """[P, C]"""
    sign: Tensor | None
    """[P, C]"""
    ridge: Tensor
    """[H, K]"""

    @staticmethod
    def build(
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        write: Tensor,
        ridge: Tensor,
        sign: Tensor | None,
        state: MesaState,
        layout: ChunkLayout,
    ) -> tuple[MesaChunks, MesaState]:
        """Cut the inputs [B, T, H, ...] and carry the state through; also returns the state after the last token."""
        dtype = state.kk.dtype
        decays, writes = layout.split(log_decay, dtype), layout.split(write, dtype)
        # A sign of zero, as padding would be, would wipe out the state.
        signs = None if sign is None else layout.split(sign - 1, dtype) + 1
        weight = decay_to_end(decays, signs) * writes
        total = decay_from_start(decays, signs)[..., -1]
        keys, values = layout.view(layout.pad(k)), layout.view(layout.pad(v))
        size = k.shape[-1]
        bank = torch.empty(*keys.shape[:3], size + layout.chunk, size, dtype=dtype, device=k.device)
        bank[..., size:, :] = keys
        keys = bank[..., size:, :]
        _, kk_after = scan_states(keys, keys, weight, total, state.kk, layout, out=bank[..., :size, :])
        kv, kv_after = scan_states(keys, values, weight, total, state.kv, layout)
        chunks = MesaChunks(
            bank=bank.flatten(0, 2),
            kv=kv.flatten(0, 2),
            values=values,
            log_decay=decays.flatten(0, 2),
            write=writes.flatten(0, 2),
            sign=None if signs is None else signs.flatten(0, 2),
            ridge=ridge.to(dtype),
        )
        return chunks, MesaState(kk_after, kv_after)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All the tensors, in the order in which `from_tensors` takes them."""
        return (self.bank, self.kv, self.values, self.log_decay, self.write, self.sign, self.ridge)

    @staticmethod
    def from_tensors(tensors: list[Any]) -> MesaChunks:
        """The inverse of `tensors`."""
        bank, kv, values, log_decay, write, sign, ridge = tensors
        return MesaChunks(bank=bank, kv=kv, values=values, log_decay=log_decay, write=write, sign=sign, ridge=ridge)

    @property
    def grid(self) -> tuple[int, int, int]:
        """R, H, N."""
        rows, heads, chunks = self.values.shape[:3]
        return rows, heads, chunks

    def systems(self, tile: Tile, preconditioner: Preconditioner | None = None) -> RidgeSystems:
        """The systems of a tile, with the preconditioner given, or a new one where the tile wants one."""
        bank, write = tile.take(self.bank, "bank"), self.write[tile.where]
        sign = None if self.sign is None else self.sign[tile.where]
        within = tile.workspace.room("within", len(tile.index), *write.shape[1:], *write.shape[1:])
        decay = chunk_decay(self.log_decay[tile.where], sign, within)
        ridge = self.ridge[tile.cell[1]]
        if tile.slow and preconditioner is None:
            preconditioner = Preconditioner(bank, decay.from_start, write, ridge)
        return RidgeSystems(bank, decay, write, ridge, tile.workspace, preconditioner)

    def tiles(self, solver: ConjugateGradient) -> list[Tile]:
        """All the problems in tiles of like with like."""
        rows, heads, chunks = self.grid
        if self.bank.shape[0] == 0:
            return []
        kept = self.log_decay.sum(dim=-1)
        by_row = kept.unflatten(0, (rows * heads, chunks)).mean(dim=-1).argsort(stable=True)
        order = (by_row.unsqueeze(-1) * chunks + torch.arange(chunks, device=kept.device)).flatten()
        slow = torch.zeros_like(order, dtype=torch.bool)
        if solver.preconditioner == "auto" and solver.max_steps > 0 and self.sign is None:
            slow = kept[order] >= math.log(SLOW)
        workspace = Workspace(self.bank.dtype, self.bank.device)
        size = self._tile_size()
        parts = [(part, is_slow) for is_slow in (False, True) for part in order[slow == is_slow].split(size)]
        return [self._tile(index, is_slow, workspace) for index, is_slow in parts if len(index)]

    def problems_at_once(self) -> int:
        """How many problems fit the room of a tile."""
        chunk, (wide, size) = self.write.shape[-1], self.bank.shape[1:]
        numbers = 6 * chunk * size + 2 * chunk * wide + 2 * size * wide
        room = CPU_TILE_BYTES if self.bank.device.type == "cpu" else DEVICE_TILE_BYTES
        return max(1, room // (numbers * self.bank.element_size()))

    def _tile_size(self) -> int:
        """How many problems make a tile: whole rows, or equal parts of a row, so that most stand side by side."""
        chunks, fitting = self.grid[2], self.problems_at_once()
        if fitting >= chunks:
            return fitting // chunks * chunks
        return math.ceil(chunks / math.ceil(chunks / fitting))

    def _tile(self, index: Tensor, slow: bool, workspace: Workspace) -> Tile:
        _, heads, chunks = self.grid
        row_and_head = index.div(chunks, rounding_mode="floor")
        row, head, chunk = row_and_head.div(heads, rounding_mode="floor"), row_and_head % heads, index % chunks
        step = index.diff()
        breaks = ((step != 1) | (row_and_head.diff() != 0)).nonzero().flatten() + 1
        runs = []
        if len(breaks) < max(4, len(index) // 4):
            bounds = [0, *breaks.tolist(), len(index)]
            for begin, end in pairwise(bounds):
                first = int(chunk[begin])
                run = Run(slice(begin, end), int(row[begin]), int(head[begin]), slice(first, first + end - begin))
                runs.append(run)
        first = int(index[0])
        where = slice(first, first + len(index)) if bool((step == 1).all()) else index
        return Tile(index=index, where=where, cell=(row, head, chunk), runs=runs, slow=slow, workspace=workspace)
