"""Products of forget gates within a chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class ChunkDecay(NamedTuple):
    """The forget factors of a chunk; every one is a product of gates, so none can overflow."""

    within: Tensor
    """[..., C, C] zeta_ts: what is left at token t of what token s wrote; zero above the diagonal."""
    from_start: Tensor
    """[..., C] what is left at token t of the state at the start of the chunk."""
    to_end: Tensor
    """[..., C] what is left at the end of the chunk of what token s wrote."""


def chunk_decay(log_decay: Tensor, sign: Tensor | None = None, within: Tensor | None = None) -> ChunkDecay:
    """Forget factors of chunks [..., C] of log decays; `sign` (+1 or -1) makes the gates negative."""
    return ChunkDecay(
        within=decay_within(log_decay, sign, within),
        from_start=decay_from_start(log_decay, sign),
        to_end=decay_to_end(log_decay, sign),
    )


def decay_within(log_decay: Tensor, sign: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """zeta [..., C, C]: the product of the gates s+1..t at row t and column s <= t, and zero elsewhere.

    It is the exponential of a sum over exactly those tokens. Differences of a running sum would be cheaper, but they
    lose digits after a strong gate, and are NaN after a gate of zero (minus infinity minus minus infinity).
    """
    chunk = log_decay.shape[-1]
    within: Tensor = torch.tril(log_decay.unsqueeze(-1).expand(*log_decay.shape, chunk), -1, out=out)
    within.cumsum_(-2).exp_().tril_()
    if sign is not None:
        parity = sign.cumprod(-1)
        within *= parity.unsqueeze(-1) * parity.unsqueeze(-2)
    return within


def decay_from_start(log_decay: Tensor, sign: Tensor | None = None) -> Tensor:
    """[..., C]: the product of the gates of the chunk up to and with token t."""
    from_start = log_decay.cumsum(-1).exp_()
    return from_start if sign is None else from_start * sign.cumprod(-1)


def decay_to_end(log_decay: Tensor, sign: Tensor | None = None) -> Tensor:
    """[..., C]: the product of the gates of the chunk after token s."""
    to_end = _product_after(log_decay, torch.cumsum, 0.0).exp_()
    return to_end if sign is None else to_end * _product_after(sign, torch.cumprod, 1.0)


def _product_after(gates: Tensor, accumulate: Callable[..., Tensor], neutral: float) -> Tensor:
    """What `accumulate` makes of all the entries after each one."""
    after = torch.cat([gates[..., 1:], torch.full_like(gates[..., :1], neutral)], dim=-1)
    return accumulate(after.flip(-1), dim=-1).flip(-1)
