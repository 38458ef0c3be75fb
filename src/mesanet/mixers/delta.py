"""The delta rule, without and with a forget gate."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mesanet.mixers.base import Gates, HeadMixer
from mesanet.mixers.layout import Layout
from mesanet.ops.delta_rule import gated_delta_rule


class GatedDeltaNet(HeadMixer):
    """Forget, then correct what the state answers to k_t towards v_t by the input gate."""

    signed_gates = True

    def mix(self, q: Tensor, k: Tensor, v: Tensor, gates: Gates, state: Any, layout: Layout) -> tuple[Tensor, Any]:
        """The delta rule with whatever gates there are."""
        assert gates.write is not None
        return gated_delta_rule(
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


class DeltaNet(GatedDeltaNet):
    """The delta rule without forgetting."""

    forgets = False
    signed_gates = False
