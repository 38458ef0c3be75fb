"""The keys and values that attention remembers."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mesanet.mixers.layout import join_history

_CLAIMING = Lock()
"""One for all buffers: a buffer with its own could be neither copied nor pickled."""


class _Buffer:
    """Room for keys and values, filled from the left."""

    def __init__(self, keys: Tensor, values: Tensor, used: int) -> None:
        self.keys = keys
        self.values = values
        self._used = used

    def claim(self, begin: int, end: int) -> bool:
        """Take these slots for oneself, if they exist and `begin` is the first that nobody else has taken.

        To be asked before anything is written: of several threads that append to the same value one gets them.
        """
        with _CLAIMING:
            if self._used != begin or end > self.keys.shape[2]:
                return False
            self._used = end
            return True


class KeyValues:
    """The keys and values that attention has seen: [B, H, slots, K] and [B, H, slots, V].

    A value, not a container: appending returns a new one. Both share one buffer, so that decoding copies only the new
    token; whoever appends second to the same value gets a buffer of its own.
    """

    def __init__(self, buffer: _Buffer, slots: int, valid: Tensor | None) -> None:
        self._buffer = buffer
        self.slots = slots
        self.valid = valid

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, valid: Tensor | None = None) -> KeyValues:
        """Start with these, of which `valid` [B, slots] are real."""
        return cls(_Buffer(keys, values, keys.shape[2]), keys.shape[2], valid)

    @property
    def keys(self) -> Tensor:
        """[B, H, slots, K]"""
        return self._buffer.keys[:, :, : self.slots]

    @property
    def values(self) -> Tensor:
        """[B, H, slots, V]"""
        return self._buffer.values[:, :, : self.slots]

    def append(self, keys: Tensor, values: Tensor, real: Tensor | None, *, in_place: bool) -> KeyValues:
        """The same with more at the end; `real` [B, T] is false for padding.

        `in_place` allows to write behind what the buffer holds, where nobody else has.
        """
        keys, values = keys.to(self._buffer.keys.dtype), values.to(self._buffer.values.dtype)
        valid = self._valid_after(real, keys)
        slots = self.slots + keys.shape[2]
        if not in_place or (torch.is_grad_enabled() and self._differentiable()):
            joined = torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)
            return KeyValues(_Buffer(*joined, slots), slots, valid)
        buffer = self._buffer
        if self._frozen() or not buffer.claim(self.slots, slots):
            buffer = self._grown(slots)
        buffer.keys[:, :, self.slots : slots] = keys
        buffer.values[:, :, self.slots : slots] = values
        return KeyValues(buffer, slots, valid)

    def map(self, function: Callable[[Tensor], Tensor]) -> KeyValues:
        """Apply a function to keys, values and their mask."""
        valid = None if self.valid is None else function(self.valid)
        return KeyValues.of(function(self.keys), function(self.values), valid)

    def _valid_after(self, real: Tensor | None, keys: Tensor) -> Tensor | None:
        if self.valid is None and real is None:
            return None
        rows, fresh = keys.shape[0], keys.shape[2]
        before = keys.new_ones(rows, self.slots, dtype=torch.bool) if self.valid is None else self.valid
        after = keys.new_ones(rows, fresh, dtype=torch.bool) if real is None else real
        return torch.cat([before, after], dim=1)

    def _differentiable(self) -> bool:
        """Whether autograd watches what is in the buffer."""
        return self._buffer.keys.requires_grad or self._buffer.values.requires_grad

    def _frozen(self) -> bool:
        """Whether PyTorch forbids to write into the buffer, or autograd watches it."""
        return self._differentiable() or (self._buffer.keys.is_inference() and not torch.is_inference_mode_enabled())

    def _grown(self, slots: int) -> _Buffer:
        """A copy with room for at least twice as much, so that n appended tokens cost O(n) copies.

        The first `slots` are taken.
        """
        capacity = max(2 * slots, 64)
        copies = []
        for old in (self.keys, self.values):
            room = old.new_empty(*old.shape[:2], capacity, old.shape[3])
            room[:, :, : self.slots] = old.detach()
            copies.append(room)
        return _Buffer(copies[0], copies[1], slots)

    def row(self, row: int) -> KeyValues:
        """One row, without its padding."""
        keys, values = self.keys[row : row + 1], self.values[row : row + 1]
        if self.valid is not None:
            keys, values = keys[:, :, self.valid[row]], values[:, :, self.valid[row]]
        return KeyValues.of(keys, values)

    @staticmethod
    def stack(rows: list[KeyValues]) -> KeyValues:
        """Single rows of different lengths as one, padded at the left."""
        slots = max(row.slots for row in rows)
        keys = torch.cat([F.pad(row.keys, (0, 0, slots - row.slots, 0)) for row in rows])
        values = torch.cat([F.pad(row.values, (0, 0, slots - row.slots, 0)) for row in rows])
        if all(row.slots == slots for row in rows):
            return KeyValues.of(keys, values)
        lengths = torch.tensor([row.slots for row in rows], device=keys.device)
        return KeyValues.of(keys, values, torch.arange(slots, device=keys.device) >= slots - lengths[:, None])


class Window(NamedTuple):
    """The last keys and values that windowed attention has seen; between two calls, in a fixed number of slots."""

    keys: Tensor
    """[B, slots, H, K]"""
    values: Tensor
    """[B, slots, H, V]"""
    valid: Tensor | None
    """[B, slots] false where the sequence had not begun yet; None where every slot holds a token."""

    @classmethod
    def empty(cls, k: Tensor, v: Tensor) -> Window:
        """Nothing seen yet, for keys and values like these [B, T, H, K]."""
        return cls(k[:, :0], v[:, :0], None)

    @property
    def slots(self) -> int:
        """Number of places."""
        return self.keys.shape[1]

    def mask(self) -> Tensor:
        """`valid`, written out where it is None."""
        return self.keys.new_ones(self.keys.shape[:2], dtype=torch.bool) if self.valid is None else self.valid

    def append(self, k: Tensor, v: Tensor, padding: Tensor | None) -> Window:
        """The same with [B, T, H, K] at the end, of which the first `padding` [B] are none."""
        keys, values = join_history(self.keys, k, padding), join_history(self.values, v, padding)
        if self.valid is None and padding is None:
            return Window(keys, values, None)
        fresh = k.new_ones(k.shape[:2], dtype=torch.bool)
        if padding is not None:
            fresh = torch.arange(k.shape[1], device=k.device) >= padding[:, None]
        return Window(keys, values, join_history(self.mask(), fresh, padding))

    def without_empty(self) -> Window:
        """The same without the slots at the front that are empty in every row."""
        if self.valid is None:
            return self
        empty = int((~self.valid.any(dim=0)).sum())
        valid = self.valid[:, empty:]
        return Window(self.keys[:, empty:], self.values[:, empty:], None if bool(valid.all()) else valid)

    def led_by(self, slots: int) -> Window:
        """The same behind so many empty slots."""
        if slots == 0:
            return self
        keys, values = (F.pad(tensor, (0, 0, 0, 0, slots, 0)) for tensor in (self.keys, self.values))
        return Window(keys, values, F.pad(self.mask(), (slots, 0)))

    def last(self, slots: int) -> Window:
        """So many of the last slots, the first of them empty where there are fewer."""
        begin = max(0, self.slots - slots)
        # Cloned: views would keep the whole prompt in memory for as long as the window lives.
        valid = None if self.valid is None else self.valid[:, begin:].clone()
        kept = Window(self.keys[:, begin:].clone(), self.values[:, begin:].clone(), valid)
        return kept.led_by(slots - kept.slots)

    def row(self, row: int) -> Window:
        """One row, without its empty slots."""
        keys, values = self.keys[row : row + 1], self.values[row : row + 1]
        if self.valid is not None:
            keys, values = keys[:, self.valid[row]], values[:, self.valid[row]]
        return Window(keys, values, None)

    @staticmethod
    def stack(rows: list[Window]) -> Window:
        """Single rows as one."""
        full = all(row.valid is None for row in rows)
        keys, values = torch.cat([row.keys for row in rows]), torch.cat([row.values for row in rows])
        return Window(keys, values, None if full else torch.cat([row.mask() for row in rows]))
