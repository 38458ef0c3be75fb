"""What all token-by-token rules share: running over packed sequences, gates, and stacking outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

State = TypeVar("State")


def over_sequences(
    rule: Callable[..., tuple[Tensor, State]],
    tensors: Mapping[str, Tensor | None],
    state: State | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, State]:
    """Run `rule` on a dense batch, or on each packed sequence alone with its own row of the state.

    `tensors` are [B, T, ...]; with `cu_seqlens` [S+1] B is 1 and token `cu_seqlens[i]` opens sequence i.
    """
    if cu_seqlens is None:
        return rule(**tensors, state=state)
    bounds = [int(bound) for bound in cu_seqlens]
    if len(bounds) == 1:
        # No sequences: a token-less one tells the shapes, and none of its state is kept.
        nothing = {name: None if tensor is None else tensor[:, :0] for name, tensor in tensors.items()}
        output, last = rule(**nothing, state=None)
        return output, combine(lambda parts: parts[0][:0], [last])
    outputs: list[Tensor] = []
    states: list[State] = []
    for row, (start, end) in enumerate(pairwise(bounds)):
        pieces = {name: None if tensor is None else tensor[:, start:end] for name, tensor in tensors.items()}
        own_state = None if state is None else state_rows(state, row)
        output, last = rule(**pieces, state=own_state)
        outputs.append(output)
        states.append(last)
    return torch.cat(outputs, dim=1), concatenate_states(states)


def state_rows(state: State, row: int) -> State:
    """One row of every tensor in a state, kept as a batch of one."""
    rows: State = combine(lambda tensors: tensors[0][row : row + 1], [state])
    return rows


def concatenate_states(states: list[State]) -> State:
    """States of separate sequences as the rows of one state."""
    joined: State = combine(torch.cat, states)
    return joined


def combine(function: Callable[[list[Tensor]], Tensor], states: Sequence[Any]) -> Any:
    """A state made by `function` from the same tensor of every state; states are tensors or named tuples of them."""
    if isinstance(states[0], Tensor):
        return function(list(states))
    return type(states[0])(*(function(list(column)) for column in zip(*states, strict=True)))


def stack_time(outputs: list[Tensor], like: Tensor) -> Tensor:
    """Per-token outputs [B, H, V] as [B, T, H, V]; `like` [B, 0, H, V] when there are none."""
    return torch.stack(outputs, dim=1) if outputs else like.clone()


def forget_factor(log_decay: Tensor | None, sign: Tensor | None, like: Tensor) -> Tensor:
    """gamma [B, T, H] = sign * exp(log_decay); one where neither is given (`like` is [B, T, H, ...])."""
    gamma = torch.ones_like(like[..., 0]) if log_decay is None else torch.exp(log_decay)
    return gamma if sign is None else gamma * sign


def outer(left: Tensor, right: Tensor) -> Tensor:
    """left right^T over the last dimension of each: [..., K], [..., V] -> [..., K, V]."""
    return left.unsqueeze(-1) * right.unsqueeze(-2)


def read(kv: Tensor, query: Tensor) -> Tensor:
    """kv^T query: [B, H, K, V], [B, H, K] -> [B, H, V]."""
    return (kv * query.unsqueeze(-1)).sum(dim=-2)


def per_state(gate: Tensor) -> Tensor:
    """A gate per head [B, H] shaped to scale a matrix state [B, H, K, V]."""
    return gate[..., None, None]
