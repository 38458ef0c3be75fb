"""Softmax attention with rotary positions, over everything or over a window."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mesanet.config.model import ModelConfig
from mesanet.mixers.base import Mixer
from mesanet.mixers.key_values import KeyValues, Window
from mesanet.mixers.layers import Linear, apply_rotary, split_heads
from mesanet.mixers.layout import Layout, join_history

SMALLEST_BLOCK = 64
"""Queries that windowed attention handles together, at least."""


class Attention(Mixer):
    """Causal softmax attention over every token so far."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.heads = config.heads
        self.rope_base = config.rope_base
        self.query = Linear(config.width, config.heads * config.key_size)
        self.key = Linear(config.width, config.heads * config.key_size)
        self.value = Linear(config.width, config.heads * config.head_value_size)
        self.output = Linear(config.heads * config.head_value_size, config.width, gain=2 / config.layers)

    def forward(self, x: Tensor, layout: Layout, state: Any) -> tuple[Tensor, Any]:
        """Project, rotate, attend, project back."""
        q, k, v = (split_heads(project(x), self.heads) for project in (self.query, self.key, self.value))
        angles = layout.rotary(
            q.shape[-1], self.rope_base, torch.float64 if x.dtype == torch.float64 else torch.float32
        )
        q, k = apply_rotary(q, *angles), apply_rotary(k, *angles)
        if layout.cu_seqlens is not None:
            output, state = self._packed(q, k, v, layout, state)
        else:
            output, state = self.attend(q, k, v, layout.padding, state)
        mixed: Tensor = self.output(output.flatten(-2))
        return mixed, state

    def attend(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, state: Any) -> tuple[Tensor, Any]:
        """Attention of [B, T, H, K], of which the first `padding` [B] are none, and the keys and values from now on."""
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        time = q.shape[2]
        real = None if padding is None else torch.arange(time, device=q.device) >= padding[:, None]
        seen = KeyValues.of(k, v, real) if state is None else state.append(k, v, real)
        keys, values = seen.keys.to(q.dtype), seen.values.to(q.dtype)
        if seen.valid is None and (time == seen.slots or time == 1):
            output = F.scaled_dot_product_attention(q, keys, values, is_causal=time > 1)
        else:
            output = F.scaled_dot_product_attention(q, keys, values, attn_mask=causal_mask(seen, time))
        return output.transpose(1, 2), seen

    def _packed(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, state: Any) -> tuple[Tensor, Any]:
        """Each sequence by itself, so that no work is spent on pairs of tokens that never meet."""
        outputs, states = [], []
        for row, (begin, end) in enumerate(layout.spans()):
            before = None if state is None else state.row(row)
            output, after = self.attend(q[:, begin:end], k[:, begin:end], v[:, begin:end], None, before)
            outputs.append(output)
            states.append(after)
        return torch.cat(outputs, dim=1), type(states[0]).stack(states)


class SlidingWindow(Attention):
    """Causal softmax attention over the last `window` tokens, in blocks: the work is T * window, not T * T."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.window = config.window

    def attend(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, state: Any) -> tuple[Tensor, Any]:
        """Each block of queries attends to itself and to the window - 1 keys before it."""
        before: Window = state if state is not None else Window.empty(k, v, self.window - 1)
        fresh = k.new_ones(k.shape[:2], dtype=torch.bool)
        if padding is not None:
            fresh = torch.arange(k.shape[1], device=k.device) >= padding[:, None]
        keys = join_history(before.keys, k, padding)
        values = join_history(before.values, v, padding)
        valid = join_history(before.valid, fresh, padding)
        kept = keys.shape[1] - self.window + 1
        # Cloned: views would keep the whole prompt in memory for as long as the window lives.
        after = Window(*(tensor[:, kept:].clone() for tensor in (keys, values, valid)))
        if q.shape[1] == 0:
            return q.new_empty(*q.shape[:3], v.shape[3]), after
        return banded_attention(q, keys, values, valid, self.window), after


def causal_mask(seen: KeyValues, time: int) -> Tensor:
    """[B or 1, 1, T, slots] which slots each of the last T tokens may attend to; padding sees at least itself."""
    slots = torch.arange(seen.slots, device=seen.keys.device)
    own = slots[-time:, None]
    allowed = slots <= own
    if seen.valid is None:
        return allowed[None, None]
    # A row without any allowed slot would be NaN.
    return ((allowed & seen.valid[:, None, :]) | (slots == own))[:, None]


def banded_attention(q: Tensor, keys: Tensor, values: Tensor, valid: Tensor, window: int) -> Tensor:
    """[B, T, H, K] attends to [B, window - 1 + T, H, K]: token t to the slots t to t + window - 1 that are valid."""
    batch, time = q.shape[:2]
    block = min(time, max(SMALLEST_BLOCK, window // 2))
    blocks = -(-time // block)
    extra = blocks * block - time
    if extra:
        q, keys, values = (F.pad(tensor, (0, 0, 0, 0, 0, extra)) for tensor in (q, keys, values))
        valid = F.pad(valid, (0, extra))
    span = block + window - 1
    # [B, N, H, K, span] -> one problem per block: [B * N, H, span, K].
    near_keys, near_values = (tensor.unfold(1, span, block).flatten(0, 1).transpose(2, 3) for tensor in (keys, values))
    queries = q.reshape(batch * blocks, block, *q.shape[2:]).transpose(1, 2)
    place = torch.arange(block, device=q.device)[:, None]
    offset = torch.arange(span, device=q.device) - place
    band = (offset >= 0) & (offset < window)
    # A token always sees itself, padding too: a row without any allowed slot would be NaN.
    allowed = (band & valid.unfold(1, span, block).unsqueeze(2)) | (offset == window - 1)
    output = F.scaled_dot_product_attention(
        queries, near_keys.to(q.dtype), near_values.to(q.dtype), attn_mask=allowed.flatten(0, 1).unsqueeze(1)
    )
    joined: Tensor = output.transpose(1, 2).reshape(batch, blocks * block, *output.shape[1:2], output.shape[3])
    return joined[:, :time]
