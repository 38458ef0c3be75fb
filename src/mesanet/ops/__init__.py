"""The mathematics: pure functions on tensors, with no module, no config and no global switch.

The functions below stand for their modules of the same name: `mesanet.ops.mlstm` is the function. What else such a
module holds is imported from it by name, as in `from mesanet.ops.mlstm import stabilise`.
"""

from __future__ import annotations

from mesanet.ops.delta_rule import gated_delta_rule
from mesanet.ops.linear_attention import gated_linear_attention
from mesanet.ops.longhorn import longhorn
from mesanet.ops.mlstm import mlstm
from mesanet.ops.rg_lru import rg_lru

__all__ = ["gated_delta_rule", "gated_linear_attention", "longhorn", "mlstm", "rg_lru"]
