"""Walking over chunks a few at a time, so that what one step reads and writes stays in cache.

A block is a run of G chunks of the same sequences. Its tensors are [G * P, C, X], where P = rows * heads problems are
worked on side by side. On a CPU a block has as few chunks as fill the processor; elsewhere it has a whole sequence, and
only the states are carried chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mesanet.ops.chunks import ChunkLayout
from mesanet.ops.decay import decay_from_start, decay_to_end, decay_within

CPU_PROBLEMS = 16
"""Chunks of single heads that a block has at least on a CPU: enough for both small and large matrices to run well."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Chunks `begin` to `end`, all of the sequences in the rows `sequences` of the state."""

    begin: int
    end: int
    sequences: slice
    first: bool
    """Whether the sequences begin here."""
    last: bool
    """Whether the sequences end here."""


@dataclass(frozen=True, kw_only=True)
class Walk:
    """How one op goes through its chunks: which blocks there are, and how tensors are cut into them."""

    layout: ChunkLayout
    heads: int
    dtype: torch.dtype
    blocks: tuple[Block, ...]

    @staticmethod
    def plan(layout: ChunkLayout, like: Tensor, dtype: torch.dtype) -> Walk:
        """Blocks for tensors such as `like` [B, T, H, X]."""
        heads = like.shape[2]
        problems = max(1, layout.batch * heads)
        group = -(-CPU_PROBLEMS // problems) if like.device.type == "cpu" else max(1, layout.chunks)
        blocks = []
        for segment in layout.segments:
            for begin in range(segment.begin, segment.end, group):
                end = min(begin + group, segment.end)
                first, last = begin == segment.begin, end == segment.end
                blocks.append(Block(begin=begin, end=end, sequences=segment.sequences, first=first, last=last))
        return Walk(layout=layout, heads=heads, dtype=dtype, blocks=tuple(blocks))

    @property
    def problems(self) -> int:
        """P, the problems that are worked on side by side in each chunk."""
        return self.layout.batch * self.heads

    def rows(self, block: Block) -> slice:
        """Where a block lies in a tensor [N * P, ...]."""
        return slice(block.begin * self.problems, block.end * self.problems)

    def split(self, tensor: Tensor) -> Tensor:
        """[B, T, H, ...] -> [N * P, C, ...], padded with zeros."""
        return self.layout.split(tensor, self.dtype).movedim(2, 0).flatten(0, 2).contiguous()

    def merge(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """[N * P, C, ...] -> [B, T, H, ...] without the padding: the inverse of `split`."""
        grid = (self.layout.chunks, self.layout.batch, self.heads)
        return self.layout.merge(tensor.reshape(*grid, *tensor.shape[1:]).movedim(0, 2), dtype)

    def load(self, tensor: Tensor, block: Block) -> Tensor:
        """A block of [B, T, H, X] as [G * P, C, X], padded with zeros."""
        layout = self.layout
        begin, end = block.begin * layout.chunk, block.end * layout.chunk
        if layout.padded_index is not None:
            index = layout.padded_index[begin:end]
            tokens = tensor.index_select(1, index.clamp(max=layout.time - 1))
            tokens = tokens.masked_fill((index == layout.time)[:, None, None], 0)
        else:
            tokens = tensor[:, begin:end]
            if end > layout.time:
                tokens = torch.nn.functional.pad(tokens, (0, 0, 0, 0, 0, end - layout.time))
        by_chunk = tokens.reshape(layout.batch, block.end - block.begin, layout.chunk, self.heads, tensor.shape[-1])
        by_chunk = by_chunk.permute(1, 0, 3, 2, 4)
        return by_chunk.to(self.dtype, memory_format=torch.contiguous_format).contiguous().flatten(0, 2)

    def store(self, target: Tensor, part: Tensor, block: Block) -> None:
        """Write a block [G * P, C, X] to its place in `target` [B, T, H, X]."""
        layout = self.layout
        begin, end = block.begin * layout.chunk, block.end * layout.chunk
        by_chunk = part.view(block.end - block.begin, layout.batch, self.heads, layout.chunk, part.shape[-1])
        by_chunk = by_chunk.permute(1, 0, 3, 2, 4)
        if layout.padded_index is not None:
            index = layout.padded_index[begin:end]
            real = index < layout.time
            target[:, index[real]] = by_chunk.flatten(1, 2)[:, real].to(target.dtype)
        elif end > layout.time:
            target[:, begin:] = by_chunk.flatten(1, 2)[:, : layout.time - begin]
        else:
            target[:, begin:end].view(by_chunk.shape).copy_(by_chunk)

    def states(self, key: int, value: int, device: torch.device) -> Tensor:
        """Room for a state [K, V] of every problem of every chunk: [N * P, K, V]."""
        return torch.empty(self.layout.chunks * self.problems, key, value, dtype=self.dtype, device=device)

    def chunks_of(self, block: Block) -> Iterator[slice]:
        """Where each chunk of a block lies in a tensor [G * P, ...] of that block."""
        for chunk in range(block.end - block.begin):
            yield slice(chunk * self.problems, (chunk + 1) * self.problems)


@dataclass(frozen=True, kw_only=True)
class ChunkGates:
    """The gates of all N * P chunks."""

    log_decay: Tensor
    """[N * P, C]"""
    write: Tensor | None
    """[N * P, C]; none is one everywhere."""
    sign: Tensor | None
    """[N * P, C]; none is one everywhere."""
    from_start: Tensor
    """[N * P, C] what is left at token t of the state at the start of its chunk."""
    to_end: Tensor
    """[N * P, C] what is left at the end of the chunk of what token s wrote."""

    @staticmethod
    def split(walk: Walk, log_decay: Tensor, write: Tensor | None, sign: Tensor | None) -> ChunkGates:
        """Cut gates [B, T, H] into chunks."""
        decays = walk.split(log_decay)
        # Padding is zero, and a padded token has to keep the sign of the state.
        signs = None if sign is None else walk.split(sign - 1) + 1
        return ChunkGates(
            log_decay=decays,
            write=None if write is None else walk.split(write),
            sign=signs,
            from_start=decay_from_start(decays, signs),
            to_end=decay_to_end(decays, signs),
        )

    def block(self, rows: slice) -> BlockGates:
        """The gates of one block."""
        sign = None if self.sign is None else self.sign[rows]
        return BlockGates(
            within=decay_within(self.log_decay[rows], sign),
            from_start=self.from_start[rows],
            to_end=self.to_end[rows],
            write=None if self.write is None else self.write[rows],
        )


@dataclass(frozen=True, kw_only=True)
class BlockGates:
    """The gates of the n chunks of a block."""

    within: Tensor
    """[n, C, C] zeta_ts: what is left at token t of what token s wrote; zero above the diagonal."""
    from_start: Tensor
    """[n, C]"""
    to_end: Tensor
    """[n, C]"""
    write: Tensor | None
    """[n, C]; none is one everywhere."""

    @property
    def total(self) -> Tensor:
        """[n, 1, 1] what a chunk keeps of its first state."""
        return self.from_start[:, -1:, None]


class Tokens(NamedTuple):
    """q, k [n, C, K], v [n, C, V] and the gradient for the output, of the chunks of a block."""

    query: Tensor
    key: Tensor
    value: Tensor
    error: Tensor


def crossing(pairs: Tensor, from_state: Tensor, to_state: Tensor, through: Tensor) -> Tensor:
    """Gradient of log decays [n, C]: gate i counts in all that is read at t >= i and was written at s < i.

    `pairs` [n, C, C] is read at its row and written at its column; `from_state` [n, C] is read at t and was written
    before the chunk; `to_state` [n, C] is written at s and read after the chunk; `through` [n] passes the whole chunk.

    Only the terms that belong to a gate are added up: the difference of two running sums over all of them would be
    cheaper, but loses the digits of gates that matter little.
    """
    chunk = pairs.shape[-1]
    # Sums over s < i for every t by a matrix product, which is faster than a running sum along rows.
    earlier = torch.ones(chunk, chunk, dtype=pairs.dtype, device=pairs.device).triu_(1)
    written_before = torch.matmul(pairs, earlier).add_(from_state.unsqueeze(-1))
    passed = written_before.tril_().sum(dim=1).add_(through.unsqueeze(-1))
    passed[:, 1:] += to_state[:, :-1].cumsum(dim=-1)
    return passed
