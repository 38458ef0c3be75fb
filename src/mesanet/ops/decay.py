"""Products of forget gates within a chunk, and states carried from chunk to chunk."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mesanet.ops.chunks import ChunkLayout


class ChunkDecay(NamedTuple):
    """The forget factors of a chunk; every one is a product of gates, so none can overflow."""

    within: Tensor
    """[..., C, C] zeta_ts: what is left at token t of what token s wrote; zero above the diagonal."""
    from_start: Tensor
    """[..., C] what is left at token t of the state at the start of the chunk."""
    to_end: Tensor
    """[..., C] what is left at the end of the chunk of what token s wrote."""


def chunk_decay(log_decay: Tensor, sign: Tensor | None = None) -> ChunkDecay:
    """Forget factors of chunks [..., C] of log decays; `sign` (+1 or -1) makes the gates negative.

    zeta_ts is the exponential of a sum over exactly the tokens s+1..t. Differences of a running sum would be cheaper, but
    they lose digits after a strong gate, and are NaN after a gate of zero (minus infinity minus minus infinity).
    """
    chunk = log_decay.shape[-1]
    below = torch.ones(chunk, chunk, dtype=torch.bool, device=log_decay.device).tril_(-1)
    rows = log_decay.unsqueeze(-1).expand(*log_decay.shape, chunk)
    within = rows.masked_fill(~below, 0.0).cumsum(-2).exp_().tril_()
    from_start = log_decay.cumsum(-1).exp_()
    if sign is not None:
        parity = sign.cumprod(-1)
        within *= parity.unsqueeze(-1) * parity.unsqueeze(-2)
        from_start = from_start * parity
    return ChunkDecay(within=within, from_start=from_start, to_end=within[..., -1, :])


def scan_states(
    left: Tensor, right: Tensor, total: Tensor, initial: Tensor, layout: ChunkLayout
) -> tuple[Tensor, Tensor]:
    """States at the start of every chunk, and after the last one.

    `left` [R, H, N, C, K] and `right` [R, H, N, C, V] are what each chunk adds, as left^T right; `total` [R, H, N] is how
    much of the state a chunk keeps; `initial` [S, H, K, V]. Returns [R, H, N, K, V] and [S, H, K, V].
    """
    rows, heads, chunks = total.shape
    problems = rows * heads
    size, value_size = left.shape[-1], right.shape[-1]
    states = initial.new_empty(problems, chunks, size, value_size)
    final = initial.clone()
    left, right = left.flatten(0, 1), right.flatten(0, 1)
    keep = total.reshape(problems, chunks, 1, 1)
    for chunk, segment in layout.forwards():
        if chunk == segment.begin:
            states[:, chunk] = initial[segment.sequences].flatten(0, 1)
        after = states[:, chunk + 1] if chunk + 1 < segment.end else final[segment.sequences].view(states[:, 0].shape)
        torch.mul(states[:, chunk], keep[:, chunk], out=after)
        after.baddbmm_(left[:, chunk].transpose(1, 2), right[:, chunk])
    return states.view(rows, heads, chunks, size, value_size), final


def scan_states_backwards(
    left: Tensor, right: Tensor, total: Tensor, final: Tensor, layout: ChunkLayout
) -> tuple[Tensor, Tensor]:
    """The same against time: what arrives at the end of every chunk from later ones, and at the start of the first.

    `final` [S, H, K, V] arrives after the last chunk. Returns [R, H, N, K, V] and [S, H, K, V].
    """
    rows, heads, chunks = total.shape
    problems = rows * heads
    size, value_size = left.shape[-1], right.shape[-1]
    arrived = final.new_empty(problems, chunks, size, value_size)
    initial = final.clone()
    left, right = left.flatten(0, 1), right.flatten(0, 1)
    keep = total.reshape(problems, chunks, 1, 1)
    for chunk, segment in layout.backwards():
        if chunk == segment.end - 1:
            arrived[:, chunk] = final[segment.sequences].flatten(0, 1)
        before = arrived[:, chunk - 1] if chunk > segment.begin else initial[segment.sequences].view(arrived[:, 0].shape)
        torch.mul(arrived[:, chunk], keep[:, chunk], out=before)
        before.baddbmm_(left[:, chunk].transpose(1, 2), right[:, chunk])
    return arrived.view(rows, heads, chunks, size, value_size), initial
