"""Inputs for the Mesa rule: heads that forget fast or slowly, with independent or correlated keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mesanet.bench.heads import unit_vectors
from mesanet.ops.mesa import MesaOutput
from mesanet.ops.solver import ConjugateGradient
from mesanet.ops.state import MesaState

# The residual that float64 can reach on systems of condition number up to 1e3; steps without end to get there.
EXACT = ConjugateGradient(max_steps=2000, tolerance=1e-13)


class Inputs(NamedTuple):
    """The arguments of `mesa`, the state as two tensors."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    write: Tensor
    ridge: Tensor
    kk: Tensor
    kv: Tensor

    @property
    def state(self) -> MesaState:
        return MesaState(self.kk, self.kv)

    @property
    def sequences(self) -> tuple[Tensor, ...]:
        """Those that have a time dimension."""
        return self[:5]

    def to(self, dtype: torch.dtype) -> Inputs:
        return Inputs(*(tensor.detach().to(dtype) for tensor in self))

    def with_grad(self) -> Inputs:
        return Inputs(*(tensor.detach().clone().requires_grad_() for tensor in self))


def make_inputs(
    batch: int,
    time: int,
    heads: int,
    key: int,
    value: int,
    *,
    gamma: tuple[float, float] = (0.5, 1.0),
    ridge: tuple[float, float] = (0.25, 1.0),
    sequences: int | None = None,
    correlated: bool = False,
) -> Inputs:
    """Float64 inputs; every second head forgets next to nothing, so that both kinds of chunk occur."""
    low, high = gamma
    gates = low + (high - low) * torch.rand(batch, time, heads, dtype=torch.float64)
    if gamma == (0.5, 1.0):
        gates[..., 1::2] = 0.99 + 0.01 * torch.rand(batch, time, heads // 2, dtype=torch.float64)
    rows = batch if sequences is None else sequences
    past = torch.randn(rows, heads, key, key, dtype=torch.float64) / key**0.5
    low, high = ridge
    return Inputs(
        q=unit_vectors(batch, time, heads, key, correlated=correlated, dtype=torch.float64),
        k=unit_vectors(batch, time, heads, key, correlated=correlated, dtype=torch.float64),
        v=torch.randn(batch, time, heads, value, dtype=torch.float64),
        log_decay=gates.log(),
        write=torch.rand(batch, time, heads, dtype=torch.float64),
        ridge=low + (high - low) * torch.rand(heads, key, dtype=torch.float64),
        kk=past @ past.mT,
        kv=torch.randn(rows, heads, key, value, dtype=torch.float64),
    )


def gradients(inputs: Inputs, output: Tensor, state: MesaState, grad_output: Tensor) -> tuple[Tensor, ...]:
    """Gradients for all eight inputs of a loss in which the output and both states count."""
    loss = (output * grad_output).sum() + state.kk.sin().sum() + state.kv.sin().sum()
    return torch.autograd.grad(loss, inputs)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference over that of the expected."""
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).norm() / expected.norm())


def concatenated(parts: list[MesaOutput]) -> Tensor:
    return torch.cat([part.output for part in parts], dim=1)
