"""The states that the recurrences carry from token to token."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class MesaState(NamedTuple):
    """What the Mesa rule remembers of the tokens so far: two decayed sums.

    `kk` is the paper's H_t, `kv` its G_t transposed. Both are float32, or float64 for float64 inputs.
    """

    kk: Tensor
    """[B, H, K, K] decayed sum of write * k k^T."""
    kv: Tensor
    """[B, H, K, V] decayed sum of write * k v^T."""


class MlstmState(NamedTuple):
    """What mLSTM remembers: two decayed sums, both scaled by exp(-stabiliser) so that neither can overflow."""

    kv: Tensor
    """[B, H, K, V] decayed sum of exp(log_input - stabiliser) * k v^T."""
    normaliser: Tensor
    """[B, H, K] decayed sum of exp(log_input - stabiliser) * k."""
    stabiliser: Tensor
    """[B, H] log of what the sums are scaled down by: the running maximum of the decayed input gates."""


class RecursiveMesaState(NamedTuple):
    """What the original recursive Mesa layer remembers."""

    inverse: Tensor
    """[B, H, K, K] inverse of the decayed sum of ridge and write * k k^T."""
    kv: Tensor
    """[B, H, K, V] decayed sum of write * k v^T."""
