"""Softmax attention with rotary positions, over everything or over a window."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mesanet.config.model import ModelConfig
from mesanet.mixers.base import Gates, Mixer
from mesanet.mixers.key_values import KeyValues, Window
from mesanet.mixers.layers import Linear, apply_rotary, split_heads
from mesanet.mixers.layout import Layout

SMALLEST_BLOCK = 64
"""Queries that windowed attention handles together, at least."""


class Attention(Mixer):
    """Causal softmax attention over every token so far."""

    observable = True
    eager = ("angles",)

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
        angles = self.angles(q, layout)
        q, k = apply_rotary(q, *angles), apply_rotary(k, *angles)
        # Minus infinity added to a score, and a weight of zero, take out only what is a number.
        k, v = layout.blank(k), layout.blank(v)
        self.observe(q, k, v, Gates(None, None, None), layout)
        if layout.cu_seqlens is not None:
            output, state = self._packed(q, k, v, layout, state)
        else:
            output, state = self.attend(q, k, v, layout.padding, state)
        mixed: Tensor = self.output(output.flatten(-2))
        return mixed, state

    def angles(self, q: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary angles for [B, T, H, K]; the first layer that asks computes them for all."""
        return layout.rotary(q.shape[-1], self.rope_base, torch.float64 if q.dtype == torch.float64 else torch.float32)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, state: Any) -> tuple[Tensor, Any]:
        """Attention of [B, T, H, K], of which the first `padding` [B] are none, and the keys and values from now on."""
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        real = None if padding is None else torch.arange(k.shape[2], device=k.device) >= padding[:, None]
        if state is None:
            seen = KeyValues.of(k, v, real)
        else:
            # A buffer that is written to further on would spoil what the backward pass of this call needs.
            watched = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v))
            seen = state.append(k, v, real, in_place=not watched)
        return causal_attention(q, seen.keys, seen.values, seen.valid).transpose(1, 2), seen

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
        """Everything at once while it fits the window; then each block attends to itself and window - 1 keys before."""
        before: Window = Window.empty(k, v) if state is None else state
        if q.shape[1] > 1:
            # For a single token, looking for them would cost more than they do.
            before = before.without_empty()
        seen = before.append(k, v, padding)
        after = seen.last(self.window - 1)
        if q.shape[1] == 0:
            return q.new_empty(*q.shape[:3], v.shape[3]), after
        if seen.slots > self.window:
            return banded_attention(q, seen.led_by(self.window - 1 - before.slots), self.window), after
        q, keys, values = (tensor.transpose(1, 2) for tensor in (q, seen.keys, seen.values))
        return causal_attention(q, keys, values, seen.valid).transpose(1, 2), after


def causal_attention(q: Tensor, keys: Tensor, values: Tensor, valid: Tensor | None) -> Tensor:
    """The last T of the slots, [B, H, T, K], attend to all [B, H, slots, K] up to themselves that are `valid`."""
    time, slots = q.shape[2], keys.shape[2]
    keys, values = keys.to(q.dtype), values.to(q.dtype)
    if valid is None and time in (1, slots):
        return F.scaled_dot_product_attention(q, keys, values, is_causal=time > 1)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=causal_mask(slots, time, valid, q.device))


def causal_mask(slots: int, time: int, valid: Tensor | None, device: torch.device) -> Tensor:
    """[B or 1, 1, T, slots] which slots each of the last T tokens may attend to; padding sees at least itself."""
    places = torch.arange(slots, device=device)
    own = places[slots - time :, None]
    allowed = places <= own
    if valid is None:
        return allowed[None, None]
    # A row without any allowed slot would be NaN.
    return ((allowed & valid[:, None, :]) | (places == own))[:, None]


def banded_attention(q: Tensor, seen: Window, window: int) -> Tensor:
    """[B, T, H, K] attends to window - 1 + T slots: token t to the slots t to t + window - 1 that are valid."""
    keys, values, valid = seen.keys, seen.values, seen.mask()
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
