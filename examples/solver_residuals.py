"""Does a token that says it converged have a residual within the tolerance? Recomputed in float64, case by case.

The solver works in float32, updates its residual rather than computing it anew, and solves with the H_t that float32
holds. For every token that stopped early this computes ||q - (H_t + ridge) x|| / ||q|| in float64 from the inputs, and
compares what exceeds twice the tolerance with 2^-24 cond, where cond = (|H_t| + largest ridge) / smallest ridge.

    python examples/solver_residuals.py --out results
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mesanet
from mesanet.bench.heads import unit_vectors
from mesanet.cli.dispatch import parse, report_errors
from mesanet.config import check_fields, check_in_range, to_dict
from mesanet.io import write_json_atomic


@dataclass(frozen=True, kw_only=True)
class Options:
    """The largest residuals of tokens that stopped early, recomputed in float64."""

    tolerance: float = 1e-4
    """The solver's tolerance."""
    seed: int = 0
    """Seed of the tokens."""
    out: Path = Path("runs/solver-residuals")
    """Folder for the record, solver_residuals.json."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_in_range("tolerance", self.tolerance, low=0, high=1, high_open=True)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Queries and keys [1, T, 1, K] of one head that forgets at one rate."""

    queries: Tensor
    keys: Tensor
    gamma: float = 1.0
    write: float | None = None
    """None draws every write gate uniformly."""
    ridge: float = 0.25
    one_by_one: bool = False
    """One token at a time, as in decoding."""


def stiff(time: int, size: int) -> Case:
    """Correlated unit vectors, of which nothing is forgotten."""
    queries, keys = (unit_vectors(1, time, 1, size, correlated=True) for _ in range(2))
    return Case(queries=queries, keys=keys)


def longer(case: Case, factor: float) -> Case:
    """The same with longer keys."""
    return replace(case, keys=factor * case.keys)


def equal(time: int, size: int) -> Case:
    """One unit vector again and again, written in full."""
    vector = unit_vectors(1, 1, 1, size).expand(1, time, 1, size)
    return Case(queries=vector, keys=vector, write=1.0)


CASES: dict[str, Callable[[], Case]] = {
    "correlated unit keys, T = 2048": lambda: stiff(2048, 64),
    "the same, gamma 0.9975": lambda: replace(stiff(2048, 64), gamma=0.9975),
    "correlated keys of length 10, T = 1024": lambda: longer(stiff(1024, 64), 10.0),
    "correlated keys of length 100, T = 1024": lambda: longer(stiff(1024, 64), 100.0),
    "4096 equal unit keys, K = 32": lambda: equal(4096, 32),
    "1200 equal unit keys, K = 32, one token at a time": lambda: replace(equal(1200, 32), write=None, one_by_one=True),
}


def solved_queries(case: Case, write: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """x_t = (H_t + ridge)^-1 q_t [T, K] in float64 as the op finds it, and which tokens stopped early [T].

    With G = 1 at first and nothing but zeros written to it, the op reads out what is left of one times x_t.
    """
    _, time, heads, size = case.keys.shape
    state: Any = mesanet.MesaState(torch.zeros(1, heads, size, size), torch.eye(size).expand(1, heads, size, size))
    log_decay = torch.full((1, time, heads), case.gamma).log()
    solver = mesanet.ConjugateGradient(tolerance=tolerance)
    outputs, steps = [], []
    for begin in range(0, time, 1 if case.one_by_one else time):
        part = slice(begin, begin + 1) if case.one_by_one else slice(None)
        sequences = (case.queries, case.keys, torch.zeros_like(case.keys), log_decay, write)
        ridge = torch.full((heads, size), case.ridge)
        out = mesanet.mesa(*(tensor[:, part] for tensor in sequences), ridge, state, solver)
        state = out.state
        outputs.append(out.output)
        steps.append(out.steps)
    left = log_decay.double().cumsum(1).exp().unsqueeze(-1)
    x = torch.cat(outputs, dim=1).double() / left
    return x[0, :, 0], torch.cat(steps, dim=1)[0, :, 0] < solver.max_steps


def measure(case: Case, tolerance: float) -> dict[str, float]:
    """The largest condition number and residual of a case, and how far rounding explains the latter."""
    time, size = case.keys.shape[1], case.keys.shape[3]
    write = torch.rand(1, time, 1) if case.write is None else torch.full((1, time, 1), case.write)
    x, early = solved_queries(case, write, tolerance)
    queries, keys, writes = (tensor.double()[0, :, 0] for tensor in (case.queries, case.keys, write))
    kk = torch.zeros(size, size, dtype=torch.float64)
    residuals, conditions = [], []
    for q, k, weight, solution in zip(queries, keys, writes, x, strict=True):
        kk = case.gamma * kk + weight * k.outer(k)
        residuals.append((q - kk @ solution - case.ridge * solution).norm() / q.norm())
        conditions.append((torch.linalg.matrix_norm(kk, 2) + case.ridge) / case.ridge)
    residual, condition = torch.stack(residuals)[early], torch.stack(conditions)[early]
    excess = (residual - 2 * tolerance).clamp(min=0) / (2**-24 * condition)
    return {
        "stopped_early": float(early.double().mean()),
        "condition": float(condition.max()),
        "residual": float(residual.max()),
        "excess": float(excess.max()),
    }


def run(arguments: list[str]) -> None:
    """Measure every case, print the table and write the record."""
    options = parse(Options, arguments, program="solver_residuals.py")
    rows = {}
    print("| case | stopped early | largest cond | largest residual | beyond 2 tolerances, in 2^-24 cond |")
    print("|---|---:|---:|---:|---:|")
    for name, case in CASES.items():
        torch.manual_seed(options.seed)
        row = rows[name] = measure(case(), options.tolerance)
        print(
            f"| {name} | {row['stopped_early']:.0%} | {row['condition']:.1e} | {row['residual']:.1e} "
            f"| {row['excess']:.1f} |",
            flush=True,
        )
    record = {"options": to_dict(options), "torch": torch.__version__, "cases": rows}
    write_json_atomic(options.out / "solver_residuals.json", record)


if __name__ == "__main__":
    report_errors(run)
