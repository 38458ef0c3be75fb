"""What a model remembers between calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mesanet.mixers.key_values import KeyValues


def map_state(function: Callable[[Tensor], Tensor], state: Any) -> Any:
    """The same nested state, with every tensor replaced by function(tensor). The first dimension of each is the row."""
    if state is None:
        return None
    if isinstance(state, Tensor):
        return function(state)
    if isinstance(state, KeyValues):
        return state.map(function)
    if isinstance(state, tuple):
        mapped = [map_state(function, part) for part in state]
        return type(state)(*mapped) if hasattr(state, "_fields") else tuple(mapped)
    if dataclasses.is_dataclass(state) and not isinstance(state, type):
        parts = {part.name: map_state(function, getattr(state, part.name)) for part in dataclasses.fields(state)}
        return dataclasses.replace(state, **parts)
    raise TypeError(f"a mixer's state may hold tensors, tuples, dataclasses and None, not {type(state).__name__}")


def state_tensors(state: Any) -> Iterator[Tensor]:
    """Every tensor of a nested state."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_state(note, state)
    yield from found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cache:
    """The state of every layer after the tokens so far. Passing it on never changes it, so it can be branched from."""

    states: tuple[Any, ...]
    """One state per layer, as its mixer returned it."""
    mixers: tuple[str, ...]
    """The mixer of every layer of the model that this is the cache of."""
    lengths: Tensor
    """[rows] how many real tokens each row has seen."""

    @property
    def rows(self) -> int:
        """Number of sequences."""
        return self.lengths.shape[0]

    @property
    def nbytes(self) -> int:
        """Size of all that has to be kept; attention's buffer may have as much room again for tokens to come."""
        return sum(tensor.nbytes for state in self.states for tensor in state_tensors(state))

    def select(self, rows: Tensor) -> Cache:
        """The cache of these rows, in this order, repeats allowed: for beam search, or when some have ended."""
        rows = rows.to(self.lengths.device)
        return self._map(lambda tensor: tensor.index_select(0, rows.to(tensor.device)))

    def detach(self) -> Cache:
        """The same without the graph behind it."""
        return self._map(Tensor.detach)

    def to(self, device: torch.device | str) -> Cache:
        """The same on another device."""
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, function: Callable[[Tensor], Tensor]) -> Cache:
        states, lengths = map_state(function, self.states), function(self.lengths)
        return dataclasses.replace(self, states=states, lengths=lengths)
