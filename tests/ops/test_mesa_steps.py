"""The steps that the Mesa rule reports: what they promise, and what they cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.ops.mesa_cases import (
    Inputs,
    equal_tokens,
    from_nothing,
    make_inputs,
    residuals,
    solved_queries,
)
from torch import Tensor

from mesanet.bench.heads import mixed_heads
from mesanet.ops.chunks import CHUNK
from mesanet.ops.mesa import mesa
from mesanet.ops.ridge_system import RidgeSystems
from mesanet.ops.solver import ConjugateGradient

PLAIN = ConjugateGradient(preconditioner=None)
STIFF = {"gamma": (1.0, 1.0), "ridge": (0.25, 0.25), "correlated": True}
# The read-out by which the tests see the solved queries fades with the gates, so fast heads get few tokens.
ORDINARY_HEADS: dict[str, tuple[int, dict[str, Any]]] = {
    "gamma 1": (1024, STIFF),
    "gamma 0.9975": (1024, {**STIFF, "gamma": (0.9975, 0.9975)}),
    "gamma in 0.97..1": (512, {**STIFF, "gamma": (0.97, 1.0)}),
    "gamma in 0.5..1, and next to 1": (150, {"gamma": (0.5, 1.0)}),
    "gamma in 0.1..0.9": (40, {"gamma": (0.1, 0.9)}),
}


@pytest.mark.parametrize("one_by_one", [False, True], ids=["whole", "decoding"])
@pytest.mark.parametrize("solver", [ConjugateGradient(), PLAIN], ids=["auto", "plain"])
@pytest.mark.parametrize("name", ORDINARY_HEADS)
def test_steps_are_true(name: str, solver: ConjugateGradient, one_by_one: bool) -> None:
    """Every token that says it converged did: its float64 residual is within twice the tolerance."""
    time, kind = ORDINARY_HEADS[name]
    inputs = make_inputs(1, 200 if one_by_one and time > 200 else time, 2, 64, 8, **kind).to(torch.float32)
    solved, steps = solved_queries(inputs, solver, one_by_one=one_by_one)
    found, _ = residuals(inputs, solved)
    assert bool(((found < 2 * solver.tolerance) | (steps == solver.max_steps)).all())


def _screaming(scale: float, time: int) -> Inputs:
    return from_nothing(equal_tokens(make_inputs(1, time, 1, 32, 4), scale))


def _large_keys(scale: float, gamma: float) -> Inputs:
    inputs = from_nothing(make_inputs(1, 512, 1, 64, 4, **{**STIFF, "gamma": (gamma, gamma)}))
    return inputs._replace(k=scale * inputs.k)


ILL_CONDITIONED = {
    "screaming": lambda time: _screaming(1.0, 4 * time),
    "screaming, keys of length 10": lambda time: _screaming(10.0, time),
    "keys of length 100, gamma 1": lambda time: _large_keys(100.0, 1.0),
    "keys of length 100, gamma 0.9975": lambda time: _large_keys(100.0, 0.9975),
}


@pytest.mark.parametrize("one_by_one", [False, True], ids=["whole", "decoding"])
@pytest.mark.parametrize("solver", [ConjugateGradient(), PLAIN], ids=["auto", "plain"])
@pytest.mark.parametrize("name", ILL_CONDITIONED)
def test_steps_are_true_up_to_rounding(name: str, solver: ConjugateGradient, one_by_one: bool) -> None:
    """Where H is so large that float32 can't hold it to the tolerance, what is left is no more than its rounding."""
    inputs = ILL_CONDITIONED[name](300 if one_by_one else 1024).to(torch.float32)
    solved, steps = solved_queries(inputs, solver, one_by_one=one_by_one)
    found, condition = residuals(inputs, solved)
    # Rounding H, the product H x and x moves the residual by 2^-24 |H| |x| each, and |H| |x| is at most the condition
    # number times |q|. H is rounded with every update, once a chunk or once a token: n of them add up like sqrt(n).
    updates = torch.arange(1, found.shape[1] + 1)[None, :, None] / (1 if one_by_one else CHUNK)
    bound = 2 * solver.tolerance + 2**-24 * condition * (3 + updates.sqrt())
    assert bool(((found < bound) | (steps == solver.max_steps)).all())
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("gamma", [1.0, 0.9975])
def test_stiff_heads_converge(gamma: float) -> None:
    """Where 30 plain steps leave tokens unsolved, the default settings solve every one in a few."""
    inputs = from_nothing(make_inputs(1, 4096, 1, 128, 8, **{**STIFF, "gamma": (gamma, gamma)}).to(torch.float32))
    solved, steps = solved_queries(inputs, ConjugateGradient())
    assert int(steps.max()) <= 4
    assert float(residuals(inputs, solved)[0].max()) < 2e-4
    _, plain = solved_queries(inputs, PLAIN)
    assert float((plain == 30).float().mean()) > 0.5


@pytest.mark.parametrize("gate", [0.3, 0.2, 0.05, 0.01, 0.0])
def test_strong_gates_in_stiff_heads_are_paid_for_where_they_are(gate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever in a chunk they come: every token is solved, and those of other chunks take as few steps as without."""
    inputs = from_nothing(make_inputs(1, 4096, 1, 128, 8, **STIFF).to(torch.float32))
    strong = torch.arange(500, 4096, 409)
    log_decay = inputs.log_decay.clone()
    log_decay[:, strong] = torch.tensor(gate).log()
    rows = Rows(monkeypatch)
    tokens = [*inputs[:3], log_decay, inputs.write]
    products, steps = rows.of(tokens, inputs.ridge, ConjugateGradient())
    assert int(steps.max()) < 30
    elsewhere = torch.ones(4096, dtype=torch.bool)
    for token in strong.tolist():
        chunk = token // CHUNK * CHUNK
        elsewhere[chunk : token + 1 if gate == 0 else chunk + CHUNK] = False
        # Up to half a chunk's worth of tokens that nothing came before is solved without a preconditioner.
        elsewhere[token : token + 2 * CHUNK] = False
    assert int(steps[:, elsewhere].max()) <= 4
    assert products < 6 * 4096


def test_stiff_heads_cost_less_than_thirty_plain_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A use of the preconditioner is less work than a product with the systems; times: `bench_op_stiff.json`."""
    inputs = mixed_heads(batch=1, time=1024, heads=4, key_size=128, value_size=8, correlated=True)
    stiff = [tensor[:, :, :2] for tensor in inputs[:5]]
    rows = Rows(monkeypatch)
    preconditioned, _ = rows.of(stiff, inputs.ridge[:2], ConjugateGradient())
    plain, _ = rows.of(stiff, inputs.ridge[:2], ConjugateGradient(tolerance=0, preconditioner=None))
    assert 2 * preconditioned < plain / 3


@pytest.mark.parametrize("max_steps", [0, 3, 60])
def test_without_a_tolerance_all_the_steps_are_taken(max_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However early rounding ends what they can do: one product for the start, and one for each step."""
    inputs = make_inputs(1, 100, 1, 8, 4)
    tokens = [tensor.float() for tensor in inputs.sequences]
    solver = ConjugateGradient(max_steps=max_steps, tolerance=0)
    products, steps = Rows(monkeypatch).of(tokens, inputs.ridge.float(), solver)
    assert products == (max_steps + 1) * 2 * CHUNK
    assert bool((steps == max_steps).all())


def test_easy_heads_stop_early() -> None:
    inputs = mixed_heads(batch=1, time=2048, heads=4, key_size=128, value_size=8)
    # The last quarter of the heads has its gates uniform in 0.5..1.
    own = [tensor[:, :, 3:] for tensor in inputs[:5]]
    assert float(mesa(*own, inputs.ridge[3:]).steps.float().mean()) < 8


class Rows:
    """Counts the right-hand sides that products with systems are taken for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        product = RidgeSystems.matvec

        def counted(systems: RidgeSystems, vector: Tensor, *args: Any, **options: Any) -> Tensor:
            self.count += vector.shape[:-1].numel()
            return product(systems, vector, *args, **options)

        monkeypatch.setattr(RidgeSystems, "matvec", counted)

    def of(self, tensors: list[Tensor], ridge: Tensor, solver: ConjugateGradient) -> tuple[int, Tensor]:
        """The count for one call of the op, and the steps."""
        self.count = 0
        steps = mesa(*tensors, ridge, solver=solver).steps
        return self.count, steps


@pytest.mark.parametrize("solver", [ConjugateGradient(), PLAIN], ids=["auto", "plain"])
def test_a_slow_head_costs_the_others_nothing(solver: ConjugateGradient, monkeypatch: pytest.MonkeyPatch) -> None:
    """All heads together take the steps, and about the work, that each head takes by itself."""
    inputs = mixed_heads(batch=1, time=2048, heads=4, key_size=128, value_size=8, correlated=True)
    rows = Rows(monkeypatch)
    together, steps = rows.of(list(inputs[:5]), inputs.ridge, solver)
    apart = 0
    for head in range(4):
        here = slice(head, head + 1)
        own, own_steps = rows.of([tensor[:, :, here] for tensor in inputs[:5]], inputs.ridge[here], solver)
        assert torch.equal(own_steps, steps[:, :, here])
        apart += own
    means = steps.float().mean((0, 1))
    if solver is PLAIN:
        assert float(means.max()) > 2 * float(means.min())
    assert apart > 0
    assert together <= 1.1 * apart


def test_no_tolerance_means_all_steps() -> None:
    inputs = make_inputs(1, 70, 2, 8, 4).to(torch.float32)
    got = mesa(*inputs[:6], inputs.state, solver=ConjugateGradient(max_steps=7, tolerance=0))
    assert bool((got.steps == 7).all())
