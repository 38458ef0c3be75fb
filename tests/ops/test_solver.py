"""Conjugate gradient on systems that are plain matrices: what it returns, whoever asks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mesanet.ops.solver import Solution, conjugate_gradient
from mesanet.ops.workspace import Workspace

EPS = torch.finfo(torch.float64).eps


class Dense:
    """Positive definite matrices [n, K, K], with the inverses of their diagonals as a preconditioner or without."""

    def __init__(self, matrices: Tensor, precondition: bool) -> None:
        self.matrices = matrices
        self.diagonal = matrices.diagonal(dim1=-2, dim2=-1)
        self.with_preconditioner = precondition

    def matvec(self, vector: Tensor) -> Tensor:
        return (self.matrices @ vector.unsqueeze(-1)).squeeze(-1)

    def start(self, rhs: Tensor) -> tuple[Tensor, Tensor]:
        guess = rhs / self.diagonal
        return guess, self.matvec(guess)

    def select(self, index: Tensor) -> Dense:
        return Dense(self.matrices[index], self.with_preconditioner)

    def precondition(self, residual: Tensor) -> Tensor | None:
        return residual / self.diagonal if self.with_preconditioner else None


def systems(count: int, size: int, *, precondition: bool = False) -> Dense:
    """Matrices whose eigenvalues lie between one and some tens, with rows of different scale."""
    roots = torch.randn(count, size, 2 * size, dtype=torch.float64) / size**0.5
    scales = (1 + torch.arange(size, dtype=torch.float64)).sqrt()
    return Dense(scales * (roots @ roots.mT) * scales[:, None] + torch.eye(size, dtype=torch.float64), precondition)


def solve(dense: Dense, rhs: Tensor, max_steps: int, tolerance: float) -> Solution:
    workspace = Workspace(rhs.dtype, rhs.device)
    return conjugate_gradient(dense, rhs.clone(), max_steps=max_steps, tolerance=tolerance, workspace=workspace)


def relative_residual(dense: Dense, solution: Solution, rhs: Tensor) -> Tensor:
    return (rhs - dense.matvec(solution.value)).norm(dim=-1) / rhs.norm(dim=-1)


@pytest.mark.parametrize("precondition", [False, True])
@pytest.mark.parametrize("tolerance", [1e-2, 1e-6, 1e-12])
def test_the_residual_is_true_and_within_the_tolerance(tolerance: float, precondition: bool) -> None:
    dense = systems(20, 12, precondition=precondition)
    rhs = torch.randn(20, 12, dtype=torch.float64)
    solution = solve(dense, rhs, 200, tolerance)
    found = relative_residual(dense, solution, rhs)
    assert bool((solution.residual <= tolerance).all())
    # Each step of the recurrence rounds a product with a matrix of norm |A| and a solution of length |x|.
    drift = 200 * EPS * torch.linalg.matrix_norm(dense.matrices) * solution.value.norm(dim=-1) / rhs.norm(dim=-1)
    assert bool(((found - solution.residual).abs() <= drift).all())


@pytest.mark.parametrize("precondition", [False, True])
def test_as_many_steps_as_unknowns_are_exact(precondition: bool) -> None:
    """In exact arithmetic; a few more make up for rounding."""
    dense = systems(10, 6, precondition=precondition)
    rhs = torch.randn(10, 6, dtype=torch.float64)
    expected = torch.linalg.solve(dense.matrices, rhs)
    torch.testing.assert_close(solve(dense, rhs, 12, 0).value, expected, rtol=1e-10, atol=1e-10)
    assert int(solve(dense, rhs, 100, 1e-6).steps.max()) <= 6


def test_a_row_does_not_see_its_neighbours() -> None:
    """Easy and hard rows together give what each gives alone up to rounding, and take the same steps."""
    dense = systems(8, 10)
    dense.matrices[::2] = torch.eye(10, dtype=torch.float64)
    dense = Dense(dense.matrices, False)
    rhs = torch.randn(8, 10, dtype=torch.float64)
    together = solve(dense, rhs, 50, 1e-8)
    assert bool((together.steps[::2] == 0).all())
    for row in range(8):
        alone = solve(Dense(dense.matrices[row : row + 1], False), rhs[row : row + 1], 50, 1e-8)
        torch.testing.assert_close(alone.value[0], together.value[row], rtol=1e-13, atol=1e-13)
        assert int(alone.steps) == int(together.steps[row])


@pytest.mark.parametrize("precondition", [False, True])
def test_nothing_asked_and_no_step_allowed(precondition: bool) -> None:
    dense = systems(3, 5, precondition=precondition)
    rhs = torch.randn(3, 5, dtype=torch.float64)
    rhs[1] = 0.0
    start = solve(dense, rhs, 0, 1e-4)
    torch.testing.assert_close(start.value, rhs / dense.diagonal, rtol=1e-15, atol=0.0)
    assert start.steps.tolist() == [0, 0, 0]
    solved = solve(dense, rhs, 50, 1e-10)
    assert bool((solved.value[1] == 0).all())
    assert float(solved.residual[1]) == 0
    assert int(solved.steps[1]) == 0


@pytest.mark.parametrize("exponent", [-900, -100, 100, 900])
def test_scale_changes_nothing_but_scale(exponent: int) -> None:
    dense = systems(4, 8)
    rhs = torch.randn(4, 8, dtype=torch.float64)
    plain, scaled = solve(dense, rhs, 50, 1e-8), solve(dense, rhs * 2.0**exponent, 50, 1e-8)
    assert torch.equal(plain.value * 2.0**exponent, scaled.value)
    assert torch.equal(plain.steps, scaled.steps)
    assert torch.equal(plain.residual, scaled.residual)


def test_a_row_that_is_no_number_says_so_and_harms_nobody() -> None:
    dense = systems(3, 5)
    rhs = torch.randn(3, 5, dtype=torch.float64)
    expected = solve(dense, rhs, 50, 1e-8)
    rhs[1, 2] = torch.nan
    found = solve(dense, rhs, 50, 1e-8)
    assert bool(found.residual[1].isnan())
    assert bool(found.value[1].isnan().any())
    assert torch.equal(found.value[::2], expected.value[::2])
