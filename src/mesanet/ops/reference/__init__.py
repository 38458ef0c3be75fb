"""Every update rule one token at a time, as the papers print it: the truth that all fast forms are compared with."""

from __future__ import annotations

from mesanet.ops.reference.delta import gated_delta_rule
from mesanet.ops.reference.linear import gated_linear_attention, mlstm
from mesanet.ops.reference.longhorn import longhorn, longhorn_exact, longhorn_step
from mesanet.ops.reference.mesa import mesa, mesa_rls
from mesanet.ops.reference.rg_lru import rg_lru

__all__ = [
    "gated_delta_rule",
    "gated_linear_attention",
    "longhorn",
    "longhorn_exact",
    "longhorn_step",
    "mesa",
    "mesa_rls",
    "mlstm",
    "rg_lru",
]
