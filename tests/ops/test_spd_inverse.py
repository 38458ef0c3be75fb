"""Inverses of positive definite matrices, and of matrices that rounding has made something else."""

from __future__ import annotations

import pytest
import torch

from mesanet.ops.spd_inverse import spd_inverse


@pytest.mark.parametrize("size", [1, 2, 31, 32, 33, 64, 100, 128, 192])
@pytest.mark.parametrize(("dtype", "roundoff"), [(torch.float32, 2**-24), (torch.float64, 2**-53)])
def test_is_the_inverse(size: int, dtype: torch.dtype, roundoff: float) -> None:
    factor = torch.randn(5, size, 2 * size, dtype=torch.float64) / size**0.5
    matrix = factor @ factor.mT + 0.25 * torch.eye(size, dtype=torch.float64)
    rounded = matrix.to(dtype)
    product = spd_inverse(rounded).double() @ rounded.double()
    # The usual bound: roundoff times the condition number, at most 6 / 0.25, times a modest multiple of the size.
    bound = roundoff * float(torch.linalg.cond(matrix).max()) * max(8, size)
    assert float((product - torch.eye(size)).abs().max()) < bound


@pytest.mark.parametrize("size", [8, 32, 64, 128])
@pytest.mark.parametrize("scale", [1e4, 1e8, 1e30])
def test_a_singular_matrix_raises_nothing(size: int, scale: float) -> None:
    """Of rank one in float32, alone and beside a sound one, which must not suffer."""
    singular = torch.full((size, size), scale)
    inverse = spd_inverse(torch.stack([singular, torch.eye(size), singular]))
    assert torch.equal(inverse[1], torch.eye(size))


def test_what_is_no_number_raises_nothing() -> None:
    matrix = torch.eye(64).expand(2, 64, 64).clone()
    matrix[0, 3, 3] = torch.nan
    inverse = spd_inverse(matrix)
    assert not bool(inverse[0].isfinite().all())
    assert torch.equal(inverse[1], torch.eye(64))
