"""Cutting sequences into chunks of equal length, and putting them together again.

Every chunkwise op works on tensors [R, H, N, C, X]: R rows of N chunks each, C tokens a chunk. A dense batch has a row
for each sequence. Packed sequences (`cu_seqlens`) share one row, and each starts in a chunk of its own, so that no
chunk ever holds two of them. The last chunk of a sequence is filled up with zeros: a token whose keys, values and
write gate are zero and whose log decay is zero changes no state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

CHUNK = 64
"""Tokens per chunk: long enough for fast matrix products, short enough that the C x C part stays small."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A run of chunks that belongs to the same sequence in every row."""

    begin: int
    """Its first chunk."""
    end: int
    """One past its last chunk; equal to `begin` for a sequence without tokens."""
    sequences: slice
    """Which rows of the state these are: one per row of the layout."""


@dataclass(frozen=True, kw_only=True)
class ChunkLayout:
    """How [B, T, ...] and [R, H, N, C, ...] correspond."""

    batch: int
    time: int
    chunk: int
    chunks: int
    segments: tuple[Segment, ...]
    padded_index: Tensor | None = None
    """[N * C] for packed sequences: which token stands at each place, or `time` for padding."""
    token_index: Tensor | None = None
    """[T] for packed sequences: the place of each token."""

    @property
    def rows(self) -> int:
        """How many rows of chunks there are: R."""
        return self.batch

    @property
    def sequences(self) -> int:
        """How many sequences there are, so how many rows the state has."""
        return self.segments[-1].sequences.stop if self.segments else 0

    def pad(self, tensor: Tensor) -> Tensor:
        """[B, T, ...] -> [R, N * C, ...], filled up with zeros; the tensor itself where nothing is missing."""
        missing = self.chunks * self.chunk - self.time
        if self.padded_index is not None:
            extended = torch.cat([tensor, tensor.new_zeros(1, 1, *tensor.shape[2:])], dim=1)
            return extended.index_select(1, self.padded_index)
        if missing == 0:
            return tensor
        return torch.cat([tensor, tensor.new_zeros(self.batch, missing, *tensor.shape[2:])], dim=1)

    def unpad(self, tensor: Tensor) -> Tensor:
        """[R, N * C, ...] -> [B, T, ...], without what `pad` added."""
        if self.token_index is not None:
            return tensor.index_select(1, self.token_index)
        # Never a view: the result of an op can then be changed in place.
        return tensor if self.chunks * self.chunk == self.time else tensor[:, : self.time].clone()

    def view(self, tensor: Tensor) -> Tensor:
        """[R, N * C, H, ...] as [R, H, N, C, ...], sharing its memory."""
        chunked: Tensor = tensor.unflatten(1, (self.chunks, self.chunk))
        return chunked.movedim(3, 1)

    def split(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, T, H, ...] -> [R, H, N, C, ...], contiguous, in `dtype`, padded with zeros."""
        return self.view(self.pad(tensor)).to(dtype).contiguous()

    def merge(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """[R, H, N, C, ...] -> [B, T, H, ...] in `dtype`, without the padding."""
        return self.unpad(tensor.movedim(1, 3).flatten(1, 2)).to(dtype)

    def forwards(self) -> Iterator[tuple[int, Segment]]:
        """Every chunk in the order of time, with the segment it lies in."""
        for segment in self.segments:
            for chunk in range(segment.begin, segment.end):
                yield chunk, segment

    def backwards(self) -> Iterator[tuple[int, Segment]]:
        """Every chunk against the order of time, with the segment it lies in."""
        for segment in self.segments:
            for chunk in reversed(range(segment.begin, segment.end)):
                yield chunk, segment


def chunk_layout(batch: int, time: int, cu_seqlens: Tensor | None = None, chunk: int = CHUNK) -> ChunkLayout:
    """The layout of a dense batch, or of packed sequences that begin and end at `cu_seqlens` [S + 1]."""
    if cu_seqlens is None:
        chunk = min(chunk, max(1, time))
        chunks = -(-time // chunk)
        segment = Segment(begin=0, end=chunks, sequences=slice(0, batch))
        return ChunkLayout(batch=batch, time=time, chunk=chunk, chunks=chunks, segments=(segment,))

    bounds = cu_seqlens.tolist()
    lengths = [end - begin for begin, end in pairwise(bounds)]
    chunk = min(chunk, max(1, max(lengths, default=1)))
    segments = []
    places = []
    chunks = 0
    for sequence, length in enumerate(lengths):
        end = chunks - (-length // chunk)
        segments.append(Segment(begin=chunks, end=end, sequences=slice(sequence, sequence + 1)))
        places.append(torch.arange(chunks * chunk, chunks * chunk + length))
        chunks = end
    token_index = torch.cat(places) if places else torch.empty(0, dtype=torch.long)
    padded_index = torch.full((chunks * chunk,), time, dtype=torch.long)
    padded_index[token_index] = torch.arange(time)
    return ChunkLayout(
        batch=batch,
        time=time,
        chunk=chunk,
        chunks=chunks,
        segments=tuple(segments),
        padded_index=padded_index.to(cu_seqlens.device),
        token_index=token_index.to(cu_seqlens.device),
    )
