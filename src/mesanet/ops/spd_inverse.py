"""Inverses of many small symmetric positive definite matrices."""

from __future__ import annotations

import torch
from torch import Tensor

_BASE = 16
"""Below this size LAPACK's factorisation is faster than another level of matrix products."""


def spd_inverse(matrix: Tensor) -> Tensor:
    """The inverse of symmetric positive definite matrices [n, K, K].

    Halving the matrix again and again (a 2 x 2 block inverse by Schur complements) leaves nearly all of the work to
    batched matrix products, which run several times as fast as LAPACK on matrices of this size. A matrix that rounding
    has made indefinite gives entries that are not finite, or of no use, rather than an error.
    """
    size = matrix.shape[-1]
    if size <= _BASE:
        factor, _ = torch.linalg.cholesky_ex(matrix)
        # Unlike `cholesky_inverse`, this only divides by the zeros on the diagonal of a factorisation that failed.
        return torch.cholesky_solve(torch.eye(size, dtype=matrix.dtype, device=matrix.device).expand_as(matrix), factor)
    half = (size + 1) // 2
    corner_inverse = spd_inverse(matrix[:, :half, :half])
    side = matrix[:, :half, half:]
    reduced = corner_inverse @ side
    schur_inverse = spd_inverse(torch.baddbmm(matrix[:, half:, half:], side.mT, reduced, alpha=-1))
    coupling = reduced @ schur_inverse
    inverse = torch.empty_like(matrix)
    inverse[:, :half, :half] = torch.baddbmm(corner_inverse, coupling, reduced.mT)
    inverse[:, :half, half:] = -coupling
    inverse[:, half:, :half] = -coupling.mT
    inverse[:, half:, half:] = schur_inverse
    return inverse
