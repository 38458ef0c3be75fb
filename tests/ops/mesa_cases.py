"""Inputs for the Mesa rule: heads that forget fast or slowly, with independent or correlated keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mesanet.bench.heads import unit_vectors
from mesanet.ops.mesa import MesaOutput, mesa
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


def from_nothing(inputs: Inputs) -> Inputs:
    """The same tokens after an empty state."""
    return inputs._replace(kk=torch.zeros_like(inputs.kk), kv=torch.zeros_like(inputs.kv))


def equal_tokens(inputs: Inputs, scale: float = 1.0) -> Inputs:
    """The first token again and again, its key times `scale`, written in full and never forgotten."""
    return inputs._replace(
        q=inputs.q[:, :1].expand_as(inputs.q),
        k=scale * inputs.k[:, :1].expand_as(inputs.k),
        v=inputs.v[:, :1].expand_as(inputs.v),
        log_decay=torch.zeros_like(inputs.log_decay),
        write=torch.ones_like(inputs.write),
    )


def token_by_token(inputs: Inputs, **options: Any) -> MesaOutput:
    """The tokens one at a time with the state carried, as in decoding."""
    state, parts = inputs.state, []
    for token in range(inputs.q.shape[1]):
        pieces = [tensor[:, token : token + 1] for tensor in inputs.sequences]
        parts.append(mesa(*pieces, inputs.ridge, state, **options))
        state = parts[-1].state
    return MesaOutput(concatenated(parts), state, torch.cat([part.steps for part in parts], dim=1))


def solved_queries(inputs: Inputs, solver: ConjugateGradient, *, one_by_one: bool = False) -> tuple[Tensor, Tensor]:
    """x_t = (H_t + ridge)^-1 q_t [B, T, H, K] in float64 as the op finds it, and its steps.

    With G = 1 at first and nothing but zeros written to it, the op reads out what is left of one times x_t.
    """
    size = inputs.q.shape[-1]
    unit = torch.eye(size, dtype=inputs.kv.dtype).expand(inputs.kk.shape).clone()
    probe = inputs._replace(v=torch.zeros_like(inputs.q), kv=unit)
    with torch.no_grad():
        got = token_by_token(probe, solver=solver) if one_by_one else mesa(*probe[:6], probe.state, solver=solver)
    left = inputs.log_decay.double().cumsum(1).exp()
    return got.output.double() / left.unsqueeze(-1), got.steps


def residuals(inputs: Inputs, solved: Tensor) -> tuple[Tensor, Tensor]:
    """||q - (H_t + ridge) x|| / ||q|| of every token [B, T, H] in float64, and how its system is conditioned.

    The second is an upper bound, (||H_t|| + largest ridge) / smallest ridge.
    """
    exact = inputs.to(torch.float64)
    kk, found, conditions = exact.kk, [], []
    for token in range(exact.q.shape[1]):
        k, x, q = exact.k[:, token], solved[:, token], exact.q[:, token]
        gamma, write = exact.log_decay[:, token].exp(), exact.write[:, token]
        kk = gamma[..., None, None] * kk + write[..., None, None] * k[..., :, None] * k[..., None, :]
        product = (kk @ x[..., None])[..., 0] + exact.ridge * x
        found.append((q - product).norm(dim=-1) / q.norm(dim=-1))
        conditions.append((torch.linalg.matrix_norm(kk) + exact.ridge.amax(-1)) / exact.ridge.amin(-1))
    return torch.stack(found, dim=1), torch.stack(conditions, dim=1)
