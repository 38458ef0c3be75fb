"""Each update of the table follows from its objective, and the ops run exactly these updates (all in float64)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mesanet.ops import reference
from mesanet.ops.objectives import TEST_TIME_RULES, Moment, newton_schulz, omega_momentum

T, K, V = 7, 5, 3
# A few hundred products of numbers of order one in float64.
EXACT = {"rtol": 1e-11, "atol": 1e-11}
BY_OPTIMISER = {
    optimiser: [name for name, rule in TEST_TIME_RULES.items() if rule.optimiser == optimiser]
    for optimiser in ("gradient step", "argmin", "orthogonalised momentum")
}


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def uniform(*shape: int) -> Tensor:
    return 0.1 + 0.8 * torch.rand(*shape, dtype=torch.float64)


@pytest.fixture
def moment() -> Moment:
    torch.manual_seed(0)
    return Moment(
        previous=normal(V, K),
        keys=normal(T, K),
        values=normal(T, V),
        forget=uniform(T),
        write=uniform(T),
        ridge=uniform(K),
        precision=uniform(V),
        momentum=normal(V, K),
    )


def gradient(name: str, phi: Tensor, moment: Moment) -> Tensor:
    phi = phi.detach().requires_grad_()
    (result,) = torch.autograd.grad(TEST_TIME_RULES[name].objective(phi, moment), phi)
    return result


def test_table_has_the_five_rules() -> None:
    assert sorted(TEST_TIME_RULES) == ["atlas", "deltanet", "gla", "longhorn", "mesa"]
    assert sum(len(names) for names in BY_OPTIMISER.values()) == 5


@pytest.mark.parametrize("name", BY_OPTIMISER["gradient step"])
def test_update_is_one_gradient_step(name: str, moment: Moment) -> None:
    step = moment.previous - moment.write[-1] * gradient(name, moment.previous, moment)
    torch.testing.assert_close(TEST_TIME_RULES[name].update(moment).phi, step, **EXACT)


@pytest.mark.parametrize("name", BY_OPTIMISER["argmin"])
def test_update_is_the_minimiser(name: str, moment: Moment) -> None:
    rule = TEST_TIME_RULES[name]
    update = rule.update(moment).phi
    at_update = gradient(name, update, moment)
    torch.testing.assert_close(at_update, torch.zeros_like(at_update), **EXACT)
    # The objective is quadratic and convex: one Newton step from anywhere lands on the minimiser.
    start = normal(V, K)
    hessian = torch.autograd.functional.hessian(lambda phi: rule.objective(phi, moment), start).reshape(V * K, V * K)
    assert torch.linalg.eigvalsh(hessian).min() > 0
    newton = start.flatten() - torch.linalg.solve(hessian, gradient(name, start, moment).flatten())
    torch.testing.assert_close(newton.reshape(V, K), update, **EXACT)


def test_atlas_adds_the_gradient_to_its_momentum_and_orthogonalises(moment: Moment) -> None:
    assert moment.momentum is not None
    momentum = moment.momentum_decay * moment.momentum + gradient("atlas", moment.previous, moment)
    torch.testing.assert_close(omega_momentum(moment), momentum, **EXACT)
    without = dataclasses.replace(moment, momentum=None)
    torch.testing.assert_close(omega_momentum(without), gradient("atlas", moment.previous, moment), **EXACT)
    # Newton-Schulz converges to U V^T of the singular value decomposition; 40 steps are far more than it needs.
    converged = dataclasses.replace(moment, newton_schulz_steps=40)
    left, _, right = torch.linalg.svd(momentum, full_matrices=False)
    expected = moment.forget[-1] * moment.previous - moment.write[-1] * left @ right
    torch.testing.assert_close(TEST_TIME_RULES["atlas"].update(converged).phi, expected, **EXACT)


def test_atlas_carries_its_momentum_from_token_to_token(moment: Moment) -> None:
    rule = TEST_TIME_RULES["atlas"]
    phi, momentum = moment.previous, None
    expected_phi, expected_momentum = moment.previous, torch.zeros(V, K, dtype=torch.float64)
    for t in range(1, T + 1):
        so_far = {field: getattr(moment, field)[:t] for field in ("keys", "values", "forget", "write")}
        here = dataclasses.replace(moment, previous=phi, momentum=momentum, **so_far)
        phi, momentum = rule.update(here)
        expected_momentum = moment.momentum_decay * expected_momentum + gradient("atlas", expected_phi, here)
        step = newton_schulz(expected_momentum, moment.newton_schulz_steps)
        expected_phi = moment.forget[t - 1] * expected_phi - moment.write[t - 1] * step
        assert momentum is not None
        torch.testing.assert_close(momentum, expected_momentum, **EXACT)
        torch.testing.assert_close(phi, expected_phi, **EXACT)


def test_newton_schulz_of_nothing_is_nothing() -> None:
    assert torch.equal(newton_schulz(torch.zeros(V, K), 5), torch.zeros(V, K))


def test_omega_sees_only_its_window(moment: Moment) -> None:
    keys = moment.keys.clone()
    keys[: T - moment.window] = 100.0
    objective = TEST_TIME_RULES["atlas"].objective
    changed = dataclasses.replace(moment, keys=keys)
    torch.testing.assert_close(objective(moment.previous, changed), objective(moment.previous, moment), **EXACT)


def batched(tensor: Tensor) -> Tensor:
    """[T, ...] as one sequence of one head, [1, T, 1, ...]."""
    return tensor[None, :, None]


OPS: dict[str, Callable[[Tensor, Moment], tuple[Tensor, object]]] = {
    "gla": lambda q, m: reference.gated_linear_attention(
        q, batched(m.keys), batched(m.values), batched(m.forget.log()), batched(m.write)
    ),
    "deltanet": lambda q, m: reference.gated_delta_rule(q, batched(m.keys), batched(m.values), None, batched(m.write)),
    "longhorn": lambda q, m: reference.longhorn_exact(
        q, batched(m.keys), batched(m.values), m.precision.expand(1, T, 1, V)
    ),
    "mesa": lambda q, m: reference.mesa(
        q, batched(m.keys), batched(m.values), batched(m.forget.log()), batched(m.write), m.ridge[None]
    ),
}


@pytest.mark.parametrize("name", sorted(OPS))
def test_op_applies_the_update_token_by_token(name: str, moment: Moment) -> None:
    queries = normal(T, K)
    phi = torch.zeros(V, K, dtype=torch.float64)
    outputs = []
    for t in range(1, T + 1):
        so_far = {field: getattr(moment, field)[:t] for field in ("keys", "values", "forget", "write")}
        phi = TEST_TIME_RULES[name].update(dataclasses.replace(moment, previous=phi, **so_far)).phi
        outputs.append(phi @ queries[t - 1])
    output, _ = OPS[name](batched(queries), moment)
    torch.testing.assert_close(output[0, :, 0], torch.stack(outputs), **EXACT)
