"""Inputs for benchmarks: heads that forget nothing, little, some and much, a quarter of each.

How many solver steps a head takes depends on how much it remembers, so a benchmark on one kind of head says little
about a trained layer, which has all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

GAMMA_RANGES = ((1.0, 1.0), (0.9975, 0.9975), (0.9, 1.0), (0.5, 1.0))
"""Lowest and highest forget gate of each quarter of the heads."""


class MesaInputs(NamedTuple):
    """Arguments of `mesanet.mesa`, in its order."""

    q: Tensor
    """[B, T, H, K], unit vectors"""
    k: Tensor
    """[B, T, H, K], unit vectors"""
    v: Tensor
    """[B, T, H, V]"""
    log_decay: Tensor
    """[B, T, H]"""
    write: Tensor
    """[B, T, H]"""
    ridge: Tensor
    """[H, K]"""


def unit_vectors(
    *shape: int,
    correlated: bool = False,
    dtype: torch.dtype = torch.float32,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Vectors [..., K] of length one: uniform on the sphere, or correlated.

    The covariance of correlated ones has eigenvalues that fall as 1 / i^2 along axes drawn at random. Sums over them
    are stiff: where nothing is forgotten, 30 plain steps of conjugate gradient do not reach a residual of 1e-4.
    """
    vectors = torch.randn(*shape, dtype=dtype, generator=generator)
    if correlated:
        size = shape[-1]
        axes, _ = torch.linalg.qr(torch.randn(size, size, dtype=dtype, generator=generator))
        vectors = vectors / torch.arange(1, size + 1, dtype=dtype) @ axes
    return normalize(vectors, dim=-1)


def mixed_heads(
    *,
    batch: int,
    time: int,
    heads: int,
    key_size: int,
    value_size: int,
    correlated: bool = False,
    gamma_ranges: Sequence[tuple[float, float]] = GAMMA_RANGES,
    strong_gates: float = 0.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> MesaInputs:
    """Draw inputs of which each part of the heads, a quarter by default, has its range of `gamma_ranges`.

    Queries and keys are `unit_vectors`, each with axes of their own if they are correlated. The write gates are uniform
    in 0..1, the ridge in 0.25..1. At a share `strong_gates` of the tokens all heads of a sequence keep only 5 %
    of what they would else have kept.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    queries, keys = (
        unit_vectors(batch, time, heads, key_size, correlated=correlated, generator=generator) for _ in range(2)
    )
    ranges = torch.tensor([gamma_ranges[head * len(gamma_ranges) // heads] for head in range(heads)])
    low, high = ranges.unbind(-1)
    gamma = low + (high - low) * uniform(batch, time, heads)
    write, ridge = uniform(batch, time, heads), 0.25 + 0.75 * uniform(heads, key_size)
    values = torch.randn(batch, time, heads, value_size, generator=generator)
    gamma = torch.where(uniform(batch, time, 1) < strong_gates, 0.05 * gamma, gamma)
    return MesaInputs(
        q=queries.to(device, dtype),
        k=keys.to(device, dtype),
        v=values.to(device, dtype),
        log_decay=gamma.log().to(device),
        write=write.to(device),
        ridge=ridge.to(device),
    )
