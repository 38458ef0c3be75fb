"""Where the tokens of one call stand: positions, padding, packed sequences."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the tokens [B, T] of one call belong to the rows of the cache.

    A dense batch has one row per sequence, whose real tokens stand at the right end, after the padding. Packed
    sequences share one batch entry, end to end, and have a row each.
    """

    positions: Tensor
    """[B, T] place of each token in its own sequence, the tokens of earlier calls counted, padding not."""
    padding: Tensor | None = None
    """[B] how many tokens at the left of each row are padding; None if there are none."""
    cu_seqlens: Tensor | None = None
    """[S + 1] where the packed sequences begin and end; None for a dense batch."""
    tables: dict[tuple[int, float, torch.dtype], tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)
    """Rotary tables, made once for all layers."""

    @property
    def real(self) -> Tensor | None:
        """[B, T] false for padding; None if every token is real."""
        if self.padding is None:
            return None
        return torch.arange(self.positions.shape[1], device=self.padding.device) >= self.padding[:, None]

    def blank(self, tensor: Tensor, value: float = 0.0) -> Tensor:
        """The same [B, T, ...], with `value` in place of what stands at padding."""
        real = self.real
        if real is None:
            return tensor
        return tensor.masked_fill(~real.view(*real.shape, *[1] * (tensor.dim() - 2)), value)

    def rotary(self, size: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, T, 1, size / 2] of the rotary angles."""
        key = (size, base, dtype)
        if key not in self.tables:
            exponents = torch.arange(0, size, 2, dtype=torch.float64, device=self.positions.device) / size
            angles = self.positions.to(torch.float64)[..., None, None] * base**-exponents
            # Of an angle of a million float32 holds the first decimal only.
            self.tables[key] = (angles.cos().to(dtype), angles.sin().to(dtype))
        return self.tables[key]

    def spans(self) -> list[tuple[int, int]]:
        """Begin and end of each packed sequence."""
        assert self.cu_seqlens is not None
        bounds = self.cu_seqlens.tolist()
        return list(pairwise(bounds))


def dense_layout(batch: int, time: int, lengths: Tensor | None, padding: Tensor | None, device: torch.device) -> Layout:
    """Layout of a batch [B, T] whose rows have had `lengths` [B] tokens before."""
    positions = torch.arange(time, device=device).expand(batch, time)
    if padding is not None:
        positions = positions - padding[:, None]
    if lengths is not None:
        positions = positions + lengths[:, None]
    return Layout(positions=positions.clamp_min(0), padding=padding)


def packed_layout(time: int, lengths: Tensor | None, cu_seqlens: Tensor, device: torch.device) -> Layout:
    """Layout of packed sequences [1, T] whose rows have had `lengths` [S] tokens before."""
    bounds = cu_seqlens.to(device=device, dtype=torch.long)
    sizes = bounds[1:] - bounds[:-1]
    offsets = -bounds[:-1] if lengths is None else lengths - bounds[:-1]
    positions = torch.arange(time, device=device) + offsets.repeat_interleave(sizes, output_size=time)
    return Layout(positions=positions[None], cu_seqlens=bounds)


def join_history(history: Tensor, fresh: Tensor, padding: Tensor | None) -> Tensor:
    """[B, P, ...] and [B, T, ...] -> [B, P + T, ...], with the history moved next to each row's first real token."""
    joined = torch.cat([history.to(fresh.dtype), fresh], dim=1)
    if padding is None:
        return joined
    kept = history.shape[1]
    places = torch.arange(joined.shape[1], device=joined.device).expand(joined.shape[:2])
    # The padding and the history change places: [history | padding | real] -> [padding | history | real].
    offset = places - padding[:, None]
    source = torch.where(offset < 0, places + kept, torch.where(offset < kept, offset, places))
    return joined[torch.arange(joined.shape[0], device=joined.device)[:, None], source]
