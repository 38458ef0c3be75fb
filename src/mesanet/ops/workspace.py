"""Memory that is used again and again."""

from __future__ import annotations

import torch
from torch import Tensor


class Workspace:
    """Room in which one tile after another is worked through.

    On a CPU, touching memory that is new to the process costs more than the arithmetic that a tile does on it.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._rooms: dict[str, Tensor] = {}

    def room(self, name: str, *shape: int) -> Tensor:
        """A tensor of this shape with arbitrary content; it shares its memory with the last one of the same name."""
        count = 1
        for size in shape:
            count *= size
        room = self._rooms.get(name)
        if room is None or room.numel() < count:
            room = self._rooms[name] = torch.empty(count, dtype=self._dtype, device=self._device)
        return room[:count].view(shape)
