"""Conjugate gradient over many independent systems at once, given only by how they multiply a vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from mesanet.ops.workspace import Workspace

Preconditioning = Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class ConjugateGradient:
    """How accurately, and with what effort, the Mesa rule solves its systems."""

    max_steps: int = 30
    """The most steps that a token may take; 0 keeps the start value q / diag(H_t + ridge)."""
    tolerance: float = 1e-4
    """A token stops once ||q - A x|| <= tolerance * ||q||; 0 takes exactly `max_steps` steps."""
    preconditioner: Preconditioning | None = "auto"
    """"auto" gives the chunks that forget slowly a preconditioner; None is the paper's plain method."""

    def __post_init__(self) -> None:
        if isinstance(self.max_steps, bool) or not isinstance(self.max_steps, int) or self.max_steps < 0:
            raise ValueError(f"max_steps: got {self.max_steps!r}, expected an integer of at least 0")
        is_number = isinstance(self.tolerance, int | float) and not isinstance(self.tolerance, bool)
        if not is_number or not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance: got {self.tolerance!r}, expected a number in [0, 1)")
        if self.preconditioner not in ("auto", None):
            raise ValueError(f"preconditioner: got {self.preconditioner!r}, expected 'auto' or None")


class Systems(Protocol):
    """Positive definite systems A x = b, one for each row of the tensors [..., K] that these methods take."""

    def matvec(self, vector: Tensor) -> Tensor:
        """A times the vector, row by row; the next call may overwrite what this one returned."""

    def start(self, rhs: Tensor) -> tuple[Tensor, Tensor]:
        """A first guess, which the solver will improve in place, and A times it, which may be overwritten likewise."""

    def precondition(self, residual: Tensor) -> Tensor | None:
        """About A^-1 times the residual, by a positive definite map, or None to do without; overwritten likewise."""


class Solution(NamedTuple):
    """What a solve returns: an answer for each row, and what it took."""

    value: Tensor
    """[..., K] the solution."""
    steps: Tensor
    """[...] int32: the steps that each row took."""
    residual: Tensor
    """[...] the final ||b - A x|| / ||b|| by the solver's own recurrence; 0 for a right-hand side of zero."""


def conjugate_gradient(
    systems: Systems, rhs: Tensor, *, max_steps: int, tolerance: float, workspace: Workspace
) -> Solution:
    """Solve A x = rhs for every row of `rhs` [..., K]; `rhs` is used up, and the solution lies in the workspace.

    A row that has converged, or whose residual is no number, is frozen: its step length is zero from then on, whatever
    its neighbours do. With a tolerance of zero every row takes `max_steps`, of which those that could only stir what
    is far below rounding have length zero. Each right-hand side is divided by its largest entry first, so that no
    square below can overflow or underflow for its scale; no absolute constant is added anywhere.
    """
    scratch = workspace.room("scratch", *rhs.shape)
    scale = torch.abs(rhs, out=scratch).amax(dim=-1, keepdim=True)
    scale = torch.where(scale > 0, scale, 1.0)
    r = rhs.div_(scale)
    rhs_norm = _norm(r)
    # Far below rounding the recurrence would go on shrinking the residual until its squares are no numbers any more.
    target = max(tolerance, torch.finfo(r.dtype).eps ** 2) * rhs_norm
    steps, active = torch.zeros_like(rhs_norm), torch.empty_like(rhs_norm)

    x, a_x = systems.start(r)
    r.sub_(a_x)
    residual = _norm(r)
    p, rho = workspace.room("p", *rhs.shape), torch.zeros_like(residual)
    for step in range(max_steps):
        torch.gt(residual, target, out=active)
        if tolerance > 0 and not bool(active.any()):
            break
        steps += active
        z = systems.precondition(r)
        last_rho, rho = rho, residual.square() if z is None else _dot(r, z, scratch).clamp_(min=0)
        rho *= active
        if step == 0:
            p.copy_(r if z is None else z)
        else:
            torch.addcmul(r if z is None else z, _ratio(rho, last_rho), p, out=p)
        a_p = systems.matvec(p)
        alpha = _ratio(rho, _dot(p, a_p, scratch).clamp_(min=0))
        x.addcmul_(alpha, p)
        r.addcmul_(alpha, a_p, value=-1)
        residual = _norm(r)
    if tolerance == 0:
        steps.fill_(max_steps)
    relative = torch.where(rhs_norm == 0, 0.0, residual / rhs_norm)
    return Solution(x.mul_(scale), steps.squeeze(-1).int(), relative.squeeze(-1))


def solve(systems: Systems, rhs: Tensor, solver: ConjugateGradient, workspace: Workspace) -> Solution:
    """Conjugate gradient with the settings of `solver`."""
    return conjugate_gradient(systems, rhs, max_steps=solver.max_steps, tolerance=solver.tolerance, workspace=workspace)


def _norm(vector: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
    return norm


def _dot(left: Tensor, right: Tensor, scratch: Tensor) -> Tensor:
    return torch.mul(left, right, out=scratch).sum(dim=-1, keepdim=True)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, neither negative, and 0 where the latter is 0: nothing is left to gain for that row."""
    return torch.div(numerator, denominator).nan_to_num_(nan=0.0, posinf=0.0)
