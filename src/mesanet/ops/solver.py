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
    """Positive definite systems A x = b of n problems, one for each row of the tensors [n, ..., K] of these methods."""

    def matvec(self, vector: Tensor) -> Tensor:
        """A times the vector, row by row; the next call may overwrite what this one returned."""

    def start(self, rhs: Tensor) -> tuple[Tensor, Tensor]:
        """A first guess, which the solver will improve in place, and A times it, which may be overwritten likewise."""

    def precondition(self, residual: Tensor) -> Tensor | None:
        """About A^-1 times the residual, by a positive definite map, or None to do without; overwritten likewise."""

    def select(self, index: Tensor) -> Systems:
        """The systems of the problems at `index` [m], for as long as the whole is at rest."""


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
    """Solve A x = rhs for every row of `rhs` [n, ..., K]; `rhs` is used up, and the solution lies in the workspace.

    A row that has converged, or whose residual is no number, is frozen: its step length is zero from then on, whatever
    its neighbours do. Problems of which all rows are frozen cost nothing any more once they are half of those at work.
    With a tolerance of zero every row takes `max_steps`, of which those that could only stir what is far below rounding
    have length zero. Each right-hand side is divided by its largest entry first, so that no square below can overflow
    or underflow for its scale; no absolute constant is added anywhere.
    """
    scratch = workspace.room("scratch", *rhs.shape)
    scale = torch.abs(rhs, out=scratch).amax(dim=-1, keepdim=True)
    scale = torch.where(scale > 0, scale, 1.0)
    r = rhs.div_(scale)
    rhs_norm = _norm(r)
    # Far below rounding the recurrence would go on shrinking the residual until its squares are no numbers any more.
    target = max(tolerance, torch.finfo(r.dtype).eps ** 2) * rhs_norm
    x, a_x = systems.start(r)
    r.sub_(a_x)
    p = workspace.room("p", *rhs.shape).zero_()
    rows = _Rows(x, r, p, torch.zeros_like(target), _norm(r), torch.zeros_like(target), target)
    _descend(systems, rows, max_steps, tolerance > 0, workspace)
    # A row that is no number has not converged, and did not stop early.
    steps = (
        torch.where(rows.residual.isfinite(), rows.steps, max_steps) if tolerance > 0 else rows.steps.fill_(max_steps)
    )
    relative = torch.where(rhs_norm == 0, 0.0, rows.residual / rhs_norm)
    return Solution(x.mul_(scale), steps.squeeze(-1).int(), relative.squeeze(-1))


class _Rows(NamedTuple):
    """How far conjugate gradient has come: vectors [n, ..., K], and numbers [n, ..., 1]."""

    x: Tensor
    r: Tensor
    """b - A x"""
    p: Tensor
    """The direction of the last step; zero before the first."""
    rho: Tensor
    """r . z of the last step, where z is the preconditioned residual."""
    residual: Tensor
    """|r|"""
    steps: Tensor
    target: Tensor
    """The |r| at which the row is done."""

    def select(self, index: Tensor) -> _Rows:
        return _Rows(*(tensor.index_select(0, index) for tensor in self))

    def put(self, index: Tensor, part: _Rows) -> None:
        """Write back what has become of the problems at `index`."""
        for whole, own in zip(self[:-1], part[:-1], strict=True):
            whole.index_copy_(0, index, own)


def _descend(systems: Systems, rows: _Rows, max_steps: int, may_stop: bool, workspace: Workspace) -> None:
    """Take up to `max_steps` steps, in place."""
    x, r, p, rho, residual, steps, target = rows
    scratch, active = workspace.room("scratch", *r.shape), torch.empty_like(target)
    for step in range(max_steps):
        torch.gt(residual, target, out=active)
        if may_stop:
            index = active.flatten(1).any(dim=1).nonzero().squeeze(1)
            if len(index) == 0:
                return
            if 2 * len(index) <= len(active):
                part = rows.select(index)
                _descend(systems.select(index), part, max_steps - step, may_stop, workspace)
                rows.put(index, part)
                return
        steps += active
        z = systems.precondition(r)
        last_rho = rho.clone()
        rho.copy_(residual.square() if z is None else _dot(r, z, scratch).clamp_(min=0)).mul_(active)
        torch.addcmul(r if z is None else z, _ratio(rho, last_rho), p, out=p)
        a_p = systems.matvec(p)
        alpha = _ratio(rho, _dot(p, a_p, scratch).clamp_(min=0))
        x.addcmul_(alpha, p)
        r.addcmul_(alpha, a_p, value=-1)
        torch.linalg.vector_norm(r, dim=-1, keepdim=True, out=residual)


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
