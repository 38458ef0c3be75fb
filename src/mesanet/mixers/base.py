"""What the mixers share: projections, convolution, gates, output norm and output projection."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mesanet.config.model import ModelConfig
from mesanet.mixers.layers import Linear, RMSNorm, ShortConvolution, split_heads, unit_length
from mesanet.mixers.layout import Layout


class Gates(NamedTuple):
    """The scalar gates of every head; at padding they leave the state alone."""

    log_decay: Tensor | None
    """[B, T, H] log of the forget gate's size, float32."""
    sign: Tensor | None
    """[B, T, H] +1 or -1, or None where every forget gate is positive."""
    write: Tensor | None
    """[B, T, H] input gate, float32."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What one layer did in one call, for looking inside a trained model."""

    layer: int
    """Which layer."""
    queries: Tensor
    """[B, T, H, K] as the rule got them: convolved and of length one, or in attention rotated."""
    keys: Tensor
    """[B, T, H, K]"""
    values: Tensor
    """[B, T, H, V]"""
    gates: Gates
    """The gates that the rule got."""
    ridge: Tensor | None
    """[H, K] the regulariser, of mesa and mesa_rls."""
    steps: Tensor | None
    """[B, T, H] solver steps that each token took, of mesa."""
    real: Tensor | None
    """[B, T] false for padding, or None where every token is real."""


class Mixer(nn.Module):
    """A layer that mixes information over time: [B, T, D] and a state -> [B, T, D] and the state after it.

    A state is None, a tensor, or nested tuples of tensors; the first dimension of every tensor is the row.
    """

    undecayed: ClassVar[tuple[str, ...]] = ()
    """Which of its own parameters, not those of its layers, weight decay leaves alone."""

    signed_gates: ClassVar[bool] = False
    """Whether its forget gates can be negative, for `gamma_range="signed"`."""

    observable: ClassVar[bool] = False
    """Whether it calls `observe`: only what has queries, keys and values can."""

    eager: ClassVar[tuple[str, ...]] = ()
    """Methods that torch.compile leaves out of its graphs: loops it would unroll, and what is kept for other layers."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        if config.gamma_range == "signed" and not self.signed_gates:
            name = config.mixer_of(layer)
            raise ValueError(f"gamma_range: got 'signed', but {name} has no signed forget gate; it takes 'positive'")
        self.layer = layer
        self.backend = "auto"
        """Which form of the op the rule runs in: "auto", or "reference" for one token after the other."""
        self.observer: Callable[[Observation], None] | None = None

    def forward(self, x: Tensor, layout: Layout, state: Any) -> tuple[Tensor, Any]:
        """Mix [B, T, D]; `layout` says where the tokens stand, `state` what came before (None for nothing)."""
        raise TypeError(f"{type(self).__name__} does not say how it mixes: it must override forward")

    def observe(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Gates,
        layout: Layout,
        *,
        ridge: Tensor | None = None,
        steps: Tensor | None = None,
    ) -> None:
        """Tell whoever looks at this layer what it does; nothing happens where nobody looks."""
        if self.observer is None:
            return
        self.observer(
            Observation(
                layer=self.layer,
                queries=q.detach(),
                keys=k.detach(),
                values=v.detach(),
                gates=Gates(*(None if gate is None else gate.detach() for gate in gates)),
                ridge=None if ridge is None else ridge.detach(),
                steps=steps,
                real=layout.real,
            )
        )


class HeadMixer(Mixer):
    """A mixer with queries, keys, values and scalar gates per head. A subclass says only its rule, in `mix`."""

    forgets: ClassVar[bool] = True
    """Whether there is a forget gate."""
    writes: ClassVar[bool] = True
    """Whether there is an input gate."""
    unit_keys: ClassVar[bool] = True
    """Whether queries and keys go through SiLU and are scaled to length one."""
    observable = True
    eager = ("mix",)
    mix_observes: ClassVar[bool] = False
    """Whether `mix` calls `observe` itself, since only the rule knows something that is to be seen."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        heads, keys, values = config.heads, config.key_size, config.head_value_size
        self.heads = heads
        self.signed = config.gamma_range == "signed"
        self.forget_bias = config.forget_bias
        self.query = Linear(config.width, heads * keys)
        self.key = Linear(config.width, heads * keys)
        self.value = Linear(config.width, heads * values)
        self.query_convolution = ShortConvolution(heads * keys, config.convolution_width)
        self.key_convolution = ShortConvolution(heads * keys, config.convolution_width)
        self.value_convolution = (
            ShortConvolution(heads * values, config.convolution_width) if config.convolve_values else None
        )
        self.forget_gate = Linear(config.width, heads, bias=True) if self.forgets else None
        self.write_gate = Linear(config.width, heads, bias=True) if self.writes else None
        self.norm = RMSNorm(heads, values, epsilon=config.norm_epsilon)
        self.output = Linear(heads * values, config.width, gain=2 / config.layers)
        self.reset_parameters()

    operations: ClassVar[Callable[[int, int], tuple[int, int, int]] | None] = None
    """What a head costs for each token, for `mesanet bench model`: a function of the key and the value size that gives
    the operations of the state update and of the output, and the numbers in the state. The mixers that the library has
    keep theirs in `bench/costs.py`, where they are counted."""

    def reset_parameters(self) -> None:
        """Set what is not drawn by the layers themselves."""
        if self.forget_gate is not None:
            with torch.no_grad():
                self.forget_gate.bias.copy_(torch.linspace(*self.forget_bias, self.heads))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, gates: Gates, state: Any, layout: Layout) -> tuple[Tensor, Any]:
        """The rule: [B, T, H, K], [B, T, H, K], [B, T, H, V] and a state -> [B, T, H, V] and the state after it."""
        raise TypeError(f"{type(self).__name__} does not say its rule: it must override mix")

    def gates(self, x: Tensor, layout: Layout) -> Gates:
        """The forget and input gates [B, T, H] from [B, T, D]."""
        log_decay = sign = write = None
        if self.write_gate is not None:
            write = layout.blank(torch.sigmoid(wide(self.write_gate(x))))
        if self.forget_gate is not None:
            logits = layout.blank(wide(self.forget_gate(x)), math.inf)
            log_decay = log_tanh_half(logits) if self.signed else F.logsigmoid(logits)
            # Zero, which has no sign, counts as positive: its logarithm makes it tiny anyway.
            sign = torch.where(logits.detach() < 0, -1.0, 1.0).to(logits.dtype) if self.signed else None
        return Gates(log_decay, sign, write)

    def forward(self, x: Tensor, layout: Layout, state: Any) -> tuple[Tensor, Any]:
        """Project, convolve, gate, apply the rule, normalise each head, and project back."""
        convolved, before = (None, None, None), None
        if state is not None:
            convolved, before = state
        q, query_state = self.query_convolution(self.query(x), layout, convolved[0])
        k, key_state = self.key_convolution(self.key(x), layout, convolved[1])
        v, value_state = self.value(x), None
        if self.value_convolution is not None:
            v, value_state = self.value_convolution(v, layout, convolved[2])
        q, k, v = (split_heads(layout.blank(tensor), self.heads) for tensor in (q, k, v))
        if self.unit_keys:
            q, k = unit_length(F.silu(q)), unit_length(F.silu(k))
        gates = self.gates(x, layout)
        with without_autocast(x):
            output, after = self.mix(q, k, v, gates, before, layout)
        if not self.mix_observes:
            self.observe(q, k, v, gates, layout)
        mixed: Tensor = self.output(self.norm(output.to(v.dtype)).flatten(-2))
        return mixed, ((query_state, key_state, value_state), after)


def without_autocast(x: Tensor) -> torch.autocast:
    """A context in which autocast changes nothing: the rules choose the precision of each of their products."""
    return torch.autocast(x.device.type, enabled=False)


def wide(x: Tensor) -> Tensor:
    """The same in float32, or float64 if it is that already."""
    return x if x.dtype == torch.float64 else x.float()


def log_tanh_half(x: Tensor) -> Tensor:
    """log |tanh(x / 2)|, bounded below so that a gate of zero keeps a finite gradient."""
    shrunk = torch.exp(-x.abs().clamp_min(1e-6))
    return torch.log1p(-shrunk) - torch.log1p(shrunk)
