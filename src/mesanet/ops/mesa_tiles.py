"""The tiles in which the Mesa rule is worked through.

A problem is one chunk of one row and head. A tile is a handful of problems that stays in cache for all of its solver
steps: a few chunks, one after the other, of a group of rows and heads. A tile goes on until its last token has
converged, so heads that keep about as much of their state, and need about as many steps, go into one group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from mesanet.ops.chunks import ChunkLayout

CPU_TILE_BYTES = 32 << 20
"""Working set of a tile on a CPU: about what a usual third-level cache holds."""
DEVICE_TILE_BYTES = 1 << 30
"""Working set of a tile elsewhere: enough problems to fill a GPU."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Neighbouring chunks of a group of rows and heads: n = G * h * r problems, in the order [G, h, r]."""

    chunks: slice
    heads: tuple[int, ...]
    rows: slice
    problems: slice
    """Where its problems stand among those of all tiles."""
    starts: slice
    """Where the states at its start stand among those of all tiles."""

    @property
    def grid(self) -> tuple[int, int, int]:
        """G, h, r."""
        return self.chunks.stop - self.chunks.start, len(self.heads), self.rows.stop - self.rows.start

    def gather(self, view: Tensor, room: Tensor) -> Tensor:
        """Copy these problems of a view [N, H, R, C, X] of any dtype to the room [n, C, X]."""
        parts, source = room.unflatten(0, self.grid), view[self.chunks, :, self.rows]
        for place, heads in self._runs():
            parts[:, place] = source[:, heads]
        return room

    def scatter(self, view: Tensor, value: Tensor) -> None:
        """Write these problems [n, C, X] of a view [N, H, R, C, X] of any dtype."""
        parts, target = value.unflatten(0, self.grid), view[self.chunks, :, self.rows]
        for place, heads in self._runs():
            target[:, heads] = parts[:, place]

    def take(self, gates: Tensor) -> Tensor:
        """These problems [n, C] of a tensor [N, H, R, C]."""
        return gates[self.chunks, list(self.heads), self.rows].flatten(0, 2)

    def put(self, gates: Tensor, value: Tensor) -> None:
        """Write these problems [n, C] of a tensor [N, H, R, C]."""
        gates[self.chunks, list(self.heads), self.rows] = value.unflatten(0, self.grid)

    def spread(self, per_head: Tensor) -> Tensor:
        """[H, K] -> [n, 1, K]."""
        chunks, heads, rows = self.grid
        size = per_head.shape[-1]
        own = per_head[list(self.heads)].view(1, heads, 1, size)
        return own.expand(chunks, heads, rows, size).reshape(-1, 1, size)

    def read_states(self, states: Tensor, sequences: slice) -> Tensor:
        """[S, H, K, V] -> [h, r, K, V] for the rows' sequences."""
        return states[sequences, list(self.heads)].transpose(0, 1)

    def write_states(self, states: Tensor, sequences: slice, value: Tensor) -> None:
        """[h * r, K, V] to its place in [S, H, K, V]."""
        states[sequences, list(self.heads)] = value.unflatten(0, self.grid[1:]).transpose(0, 1)

    def _runs(self) -> Iterator[tuple[slice, slice]]:
        """Runs of neighbouring heads: where they stand in the tile, and which heads they are."""
        begin = 0
        for place in range(1, len(self.heads) + 1):
            if place == len(self.heads) or self.heads[place] != self.heads[place - 1] + 1:
                yield slice(begin, place), slice(self.heads[begin], self.heads[place - 1] + 1)
                begin = place


def plan_tiles(kept: Tensor, fitting: int) -> list[list[Tile]]:
    """Groups of tiles; those of a group are in the order of time, and each goes on from the one before.

    `kept` [N, H, R] is the log of what each chunk keeps of its state, and `fitting` how many problems fit into a tile.
    """
    chunks, heads, rows = kept.shape
    if kept.numel() == 0:
        return []
    by_retention = kept.mean((0, 2)).argsort(stable=True).tolist()
    # A group has several chunks in a tile, and there are several groups, so that like can go with like.
    together = max(1, min(fitting, heads * rows) // 4)
    rows_together = min(rows, together)
    heads_together = max(1, together // rows_together)
    groups: list[list[Tile]] = []
    problems, starts = 0, 0
    for first_head in range(0, heads, heads_together):
        members = tuple(sorted(by_retention[first_head : first_head + heads_together]))
        for first_row in range(0, rows, rows_together):
            own_rows = slice(first_row, min(first_row + rows_together, rows))
            width = len(members) * (own_rows.stop - own_rows.start)
            length = max(1, fitting // width)
            length = math.ceil(chunks / math.ceil(chunks / length))
            group = []
            for begin in range(0, chunks, length):
                span = slice(begin, min(begin + length, chunks))
                count = width * (span.stop - span.start)
                group.append(
                    Tile(
                        chunks=span,
                        heads=members,
                        rows=own_rows,
                        problems=slice(problems, problems + count),
                        starts=slice(starts, starts + width),
                    )
                )
                problems, starts = problems + count, starts + width
            groups.append(group)
    return groups


def problems_at_once(layout: ChunkLayout, key: int, value: int, like: Tensor) -> int:
    """How many problems fit the room of a tile."""
    chunk = layout.chunk
    numbers = 8 * chunk * key + 4 * chunk * value + 5 * chunk * chunk + 2 * key * (key + value)
    room = CPU_TILE_BYTES if like.device.type == "cpu" else DEVICE_TILE_BYTES
    return max(1, room // (numbers * like.element_size()))
