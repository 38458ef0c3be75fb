"""The Mesa layer, and the original sequential one."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mesanet.config.model import ModelConfig, SolverConfig
from mesanet.mixers.base import Gates, HeadMixer, wide
from mesanet.mixers.layout import Layout
from mesanet.ops import reference
from mesanet.ops.mesa import mesa
from mesanet.ops.solver import ConjugateGradient


class RidgeMixer(HeadMixer):
    """A head mixer with a learned positive regulariser for every head and key channel."""

    undecayed = ("ridge_parameter",)

    def __init__(self, config: ModelConfig, layer: int) -> None:
        self.ridge_lower_bound = config.ridge_lower_bound
        self.ridge_initial = config.ridge_initial
        super().__init__(config, layer)
        self.ridge_parameter = nn.Parameter(torch.empty(config.heads, config.key_size))
        self.reset_ridge()

    def reset_ridge(self) -> None:
        """Start at the initial ridge: the inverse of lower bound + softplus(parameter)."""
        excess = self.ridge_initial - self.ridge_lower_bound
        with torch.no_grad():
            self.ridge_parameter.fill_(excess + math.log(-math.expm1(-excess)))

    def reset_parameters(self) -> None:
        """Set the gates' biases, and the ridge once it exists."""
        super().reset_parameters()
        if hasattr(self, "ridge_parameter"):
            self.reset_ridge()

    @property
    def ridge(self) -> Tensor:
        """[H, K] the regulariser, float32 or wider."""
        return self.ridge_lower_bound + F.softplus(wide(self.ridge_parameter))


class Mesa(RidgeMixer):
    """Ridge regression over all tokens so far, solved at every token.

    With signed forget gates the ridge has to be large enough to keep the systems positive definite.
    """

    signed_gates = True
    mix_observes = True

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.gamma_cap = config.gamma_cap
        self.training_solver = solver_from(config.training_solver)
        self.inference_solver = solver_from(config.inference_solver)

    @property
    def solver(self) -> ConjugateGradient:
        """The solver of the current mode."""
        return self.training_solver if self.training else self.inference_solver

    def gates(self, x: Tensor, layout: Layout) -> Gates:
        """The shared gates, with the forget gate capped more tightly the more is written."""
        log_decay, sign, write = super().gates(x, layout)
        assert log_decay is not None
        assert write is not None
        if self.gamma_cap < 1:
            log_decay = log_decay + torch.log1p(-(1 - self.gamma_cap) * write.square())
        return Gates(log_decay, sign, write)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, gates: Gates, state: Any, layout: Layout) -> tuple[Tensor, Any]:
        """Solve for the queries, then read the values out by linear attention."""
        assert gates.log_decay is not None
        assert gates.write is not None
        ridge = self.ridge
        out = mesa(
            q,
            k,
            v,
            gates.log_decay,
            gates.write,
            ridge,
            state=state,
            solver=self.solver,
            cu_seqlens=layout.cu_seqlens,
            backend=self.backend,
            sign=gates.sign,
        )
        self.observe(q, k, v, gates, layout, ridge=ridge, steps=out.steps)
        return out.output, out.state


class RecursiveMesa(RidgeMixer):
    """The original Mesa layer: recursive least squares, one token after the other, without forgetting."""

    forgets = False
    mix_observes = True

    def mix(self, q: Tensor, k: Tensor, v: Tensor, gates: Gates, state: Any, layout: Layout) -> tuple[Tensor, Any]:
        """Sherman-Morrison at every token, in float32 or wider."""
        assert gates.write is not None
        q, k, v, ridge = wide(q), wide(k), wide(v), self.ridge
        self.observe(q, k, v, gates, layout, ridge=ridge)
        return reference.mesa_rls(
            q,
            k,
            v,
            torch.zeros_like(gates.write),
            gates.write,
            ridge,
            state=state,
            cu_seqlens=layout.cu_seqlens,
        )


def config_of(solver: ConjugateGradient) -> SolverConfig:
    """The settings of the op's solver: the inverse of `solver_from`."""
    return SolverConfig(max_steps=solver.max_steps, tolerance=solver.tolerance, preconditioner=solver.preconditioner)


def solver_from(config: SolverConfig) -> ConjugateGradient:
    """The op's solver with these settings."""
    return ConjugateGradient(
        max_steps=config.max_steps, tolerance=config.tolerance, preconditioner=config.preconditioner
    )
