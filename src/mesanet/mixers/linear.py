"""Linear attention with gates: Mamba2, GLA, mLSTM and LongHorn."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from mesanet.config.model import ModelConfig
from mesanet.mixers.base import Gates, HeadMixer, wide
from mesanet.mixers.layers import Linear
from mesanet.mixers.layout import Layout
from mesanet.ops.linear_attention import gated_linear_attention
from mesanet.ops.longhorn import longhorn
from mesanet.ops.mlstm import mlstm

GATE_CAP = 15.0
"""mLSTM's gate logits are capped softly here, as in xLSTM's later versions, so that no gate is driven to extremes."""


class Mamba2(HeadMixer):
    """kv <- gamma kv + k v^T: a forget gate only, as the paper defines it."""

    writes = False
    signed_gates = True

    def mix(self, q: Tensor, k: Tensor, v: Tensor, gates: Gates, state: Any, layout: Layout) -> tuple[Tensor, Any]:
        """Linear attention without an input gate."""
        assert gates.log_decay is not None
        return gated_linear_attention(
            q,
            k,
            v,
            gates.log_decay,
            state=state,
            cu_seqlens=layout.cu_seqlens,
            backend=self.backend,
            sign=gates.sign,
        )


class GLA(HeadMixer):
    """kv <- gamma kv + write k v^T."""

    signed_gates = True

    def mix(self, q: Tensor, k: Tensor, v: Tensor, gates: Gates, state: Any, layout: Layout) -> tuple[Tensor, Any]:
        """Linear attention with both gates."""
        assert gates.log_decay is not None
        return gated_linear_attention(
            q,
            k,
            v,
            gates.log_decay,
            gates.write,
            state=state,
            cu_seqlens=layout.cu_seqlens,
            backend=self.backend,
            sign=gates.sign,
        )


class MLSTM(HeadMixer):
    """xLSTM's matrix memory: an exponential input gate and a normaliser; queries and keys keep their length."""

    unit_keys = False

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.scale = 1 / math.sqrt(config.key_size)

    def gates(self, x: Tensor, layout: Layout) -> Gates:
        """The forget gate's logarithm, and in place of the input gate its logarithm, which may be of any size."""
        assert isinstance(self.forget_gate, Linear)
        assert isinstance(self.write_gate, Linear)
        forget = GATE_CAP * (wide(self.forget_gate(x)) / GATE_CAP).tanh()
        write = GATE_CAP * (wide(self.write_gate(x)) / GATE_CAP).tanh()
        # A closed input gate at padding: keys and values are zero there, and this keeps the stabiliser as it is.
        return Gates(layout.blank(F.logsigmoid(forget)), None, layout.blank(write, -math.inf))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, gates: Gates, state: Any, layout: Layout) -> tuple[Tensor, Any]:
        """The stabilised recurrence."""
        assert gates.log_decay is not None
        assert gates.write is not None
        return mlstm(
            q * self.scale,
            k,
            v,
            gates.log_decay,
            gates.write,
            state=state,
            cu_seqlens=layout.cu_seqlens,
            backend=self.backend,
        )


class Longhorn(HeadMixer):
    """The diagonal LongHorn rule: kv <- (1 - k^2 step^T) kv + k (step v)^T, step = write / (1 + write k^T k)."""

    forgets = False

    def mix(self, q: Tensor, k: Tensor, v: Tensor, gates: Gates, state: Any, layout: Layout) -> tuple[Tensor, Any]:
        """One precision per head, shared by the value channels."""
        assert gates.write is not None
        precision = gates.write.unsqueeze(-1).expand(v.shape)
        return longhorn(q, k, v, precision, state=state, cu_seqlens=layout.cu_seqlens, backend=self.backend)
