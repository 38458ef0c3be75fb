"""The token-by-token rules against their definitions written out in another way, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mesanet.ops import reference
from mesanet.ops.state import MesaState

B, T, H, K, V = 2, 9, 2, 5, 3
# Sums of at most a few hundred products of numbers of order one, in float64 (unit roundoff 1e-16).
EXACT = {"rtol": 1e-11, "atol": 1e-11}


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def inputs(time: int = T) -> dict[str, Tensor]:
    return {
        "q": normal(B, time, H, K),
        "k": normal(B, time, H, K),
        "v": normal(B, time, H, V),
        "log_decay": -torch.rand(B, time, H, dtype=torch.float64),
        "write": torch.rand(B, time, H, dtype=torch.float64),
    }


def pairwise_decay(gamma: Tensor) -> Tensor:
    """zeta [B, H, T, T]: product of gamma over s+1..t, by its definition."""
    time = gamma.shape[1]
    zeta = gamma.new_zeros(gamma.shape[0], gamma.shape[2], time, time)
    for t in range(time):
        for s in range(t + 1):
            zeta[:, :, t, s] = gamma[:, s + 1 : t + 1].prod(dim=1)
    return zeta


def signs() -> Tensor:
    return torch.where(torch.rand(B, T, H) < 0.5, -1.0, 1.0).double()


@pytest.mark.parametrize("signed", [False, True])
def test_linear_attention_is_the_sum_over_past_tokens(signed: bool) -> None:
    x = inputs()
    sign = signs() if signed else torch.ones(B, T, H, dtype=torch.float64)
    zeta = pairwise_decay(sign * x["log_decay"].exp())
    output, state = reference.gated_linear_attention(**x, sign=sign if signed else None)
    expected = torch.einsum("bhts,bsh,bshv,bshk,bthk->bthv", zeta, x["write"], x["v"], x["k"], x["q"])
    torch.testing.assert_close(output, expected, **EXACT)
    last = torch.einsum("bhs,bsh,bshk,bshv->bhkv", zeta[:, :, -1], x["write"], x["k"], x["v"])
    torch.testing.assert_close(state, last, **EXACT)


def test_no_write_gate_is_a_write_gate_of_one() -> None:
    x = inputs()
    del x["write"]
    ones = torch.ones_like(x["log_decay"])
    without, _ = reference.gated_linear_attention(**x)
    with_ones, _ = reference.gated_linear_attention(**x, write=ones)
    torch.testing.assert_close(without, with_ones, **EXACT)


@pytest.mark.parametrize("signed", [False, True])
def test_mesa_is_weighted_ridge_regression(signed: bool) -> None:
    x = inputs()
    # With negative gates kk need not be positive definite; a large ridge keeps the solve regular.
    ridge = torch.rand(H, K, dtype=torch.float64) + (200 if signed else 0.25)
    sign = signs() if signed else None
    gamma = x["log_decay"].exp() if sign is None else sign * x["log_decay"].exp()
    weight = pairwise_decay(gamma) * x["write"].transpose(1, 2)[:, :, None, :]
    output, _ = reference.mesa(**x, ridge=ridge, sign=sign)
    covariance = torch.einsum("bhts,bshk,bshl->bthkl", weight, x["k"], x["k"]) + torch.diag_embed(ridge)
    correlation = torch.einsum("bhts,bshv,bshk->bthvk", weight, x["v"], x["k"])
    expected = torch.einsum("bthvk,bthkl,bthl->bthv", correlation, torch.linalg.inv(covariance), x["q"])
    torch.testing.assert_close(output, expected, **EXACT)


def test_mesa_reads_only_the_symmetric_part_of_its_state() -> None:
    x, ridge = inputs(), torch.rand(H, K, dtype=torch.float64) + 0.25
    root = normal(B, H, K, K)
    skew = normal(B, H, K, K)
    kk, kv = root @ root.mT, normal(B, H, K, V)
    symmetric, _ = reference.mesa(**x, ridge=ridge, state=MesaState(kk, kv))
    skewed, _ = reference.mesa(**x, ridge=ridge, state=MesaState(kk + skew - skew.mT, kv))
    torch.testing.assert_close(symmetric, skewed, **EXACT)


def test_recursive_mesa_equals_mesa_without_forgetting() -> None:
    x, ridge = inputs(), torch.rand(H, K, dtype=torch.float64) + 0.25
    x["log_decay"] = torch.zeros_like(x["log_decay"])
    recursive, _ = reference.mesa_rls(**x, ridge=ridge)
    direct, _ = reference.mesa(**x, ridge=ridge)
    torch.testing.assert_close(recursive, direct, **EXACT)


def test_recursive_mesa_forgets_its_ridge() -> None:
    x, ridge = inputs(), torch.rand(H, K, dtype=torch.float64) + 0.25
    _, state = reference.mesa_rls(**x, ridge=ridge)
    _, sums = reference.mesa(**x, ridge=ridge)
    faded = torch.exp(x["log_decay"].sum(dim=1))[..., None] * ridge
    torch.testing.assert_close(torch.linalg.inv(state.inverse), sums.kk + torch.diag_embed(faded), rtol=1e-9, atol=1e-9)


def test_mesa_is_a_newton_step_on_the_newest_error() -> None:
    """Phi_t = Phi_{t-1} - (Phi_{t-1} k_t - v_t) k_t^T H_t^-1, without forgetting and with write 1."""
    x, ridge = inputs(), torch.rand(H, K, dtype=torch.float64) + 0.25
    x["log_decay"], x["write"] = torch.zeros_like(x["log_decay"]), torch.ones_like(x["write"])
    phi = torch.zeros(B, H, V, K, dtype=torch.float64)
    hessian = torch.diag_embed(ridge).expand(B, H, K, K)
    outputs = []
    for t in range(T):
        key, value = x["k"][:, t, :, :, None], x["v"][:, t, :, :, None]
        hessian = hessian + key @ key.mT
        phi = phi - (phi @ key - value) @ key.mT @ torch.linalg.inv(hessian)
        outputs.append((phi @ x["q"][:, t, :, :, None]).squeeze(-1))
    output, _ = reference.mesa(**x, ridge=ridge)
    torch.testing.assert_close(output, torch.stack(outputs, dim=1), **EXACT)


@pytest.mark.parametrize("signed", [False, True])
def test_delta_rule_is_a_product_of_householder_like_matrices(signed: bool) -> None:
    x = inputs()
    sign = signs() if signed else None
    gamma = x["log_decay"].exp() if sign is None else sign * x["log_decay"].exp()
    output, state = reference.gated_delta_rule(**x, sign=sign)
    phi = torch.zeros(B, H, V, K, dtype=torch.float64)
    for t in range(T):
        key, value = x["k"][:, t, :, :, None], x["v"][:, t, :, :, None]
        write = x["write"][:, t, :, None, None]
        erase = torch.eye(K, dtype=torch.float64) - write * key @ key.mT
        phi = gamma[:, t, :, None, None] * phi @ erase + write * value @ key.mT
        torch.testing.assert_close(output[:, t], (phi @ x["q"][:, t, :, :, None]).squeeze(-1), **EXACT)
    torch.testing.assert_close(state, phi.mT, **EXACT)


def test_mlstm_is_the_plain_exponentially_gated_average() -> None:
    x = inputs()
    log_input = 2 * normal(B, T, H)
    output, state = reference.mlstm(x["q"], x["k"], x["v"], x["log_decay"], log_input, epsilon=0.0)
    weight = pairwise_decay(x["log_decay"].exp()) * log_input.exp().transpose(1, 2)[:, :, None, :]
    overlap = torch.einsum("bhts,bshk,bthk->bths", weight, x["k"], x["q"])
    numerator = torch.einsum("bths,bshv->bthv", overlap, x["v"])
    torch.testing.assert_close(output, numerator / overlap.sum(-1).abs().clamp(min=1)[..., None], **EXACT)
    plain = torch.einsum("bhs,bshk,bshv->bhkv", weight[:, :, -1], x["k"], x["v"])
    torch.testing.assert_close(state.kv * state.stabiliser.exp()[..., None, None], plain, rtol=1e-10, atol=1e-10)


def test_mlstm_survives_huge_and_shut_gates() -> None:
    x = inputs()
    for forget, gate in [(-torch.inf, -torch.inf), (0.0, 1e4), (-1e4, -1e4), (-torch.inf, 3.0)]:
        log_forget = torch.full((B, T, H), forget, dtype=torch.float64, requires_grad=True)
        log_input = torch.full((B, T, H), gate, dtype=torch.float64, requires_grad=True)
        output, _ = reference.mlstm(x["q"], x["k"], x["v"], log_forget, log_input)
        assert output.isfinite().all()
        for gradient in torch.autograd.grad(output.sum(), (log_forget, log_input)):
            assert not gradient.isnan().any()


def test_rg_lru_is_the_sum_over_past_tokens() -> None:
    x, log_decay, state = normal(B, T, V), -torch.rand(B, T, V, dtype=torch.float64), normal(B, V)
    output, last = reference.rg_lru(x, log_decay, state)
    zeta = pairwise_decay(log_decay.exp())
    scale = (1 - log_decay.exp().square()).sqrt()
    start = log_decay.cumsum(dim=1).exp() * state[:, None]
    expected = torch.einsum("bdts,bsd,bsd->btd", zeta, scale, x) + start
    torch.testing.assert_close(output, expected, **EXACT)
    torch.testing.assert_close(last, output[:, -1], **EXACT)


def test_rg_lru_starts_a_document_at_minus_infinity_and_keeps_all_at_zero() -> None:
    x, state = normal(B, 1, V), normal(B, V)
    for log_decay, expected in [(-torch.inf, x[:, 0]), (0.0, state)]:
        gate = torch.full((B, 1, V), log_decay, dtype=torch.float64, requires_grad=True)
        output, _ = reference.rg_lru(x, gate, state)
        torch.testing.assert_close(output[:, 0], expected, **EXACT)
        (gradient,) = torch.autograd.grad(output.sum(), gate)
        assert gradient.isfinite().all()


def test_longhorn_exact_minimises_its_loss_and_diagonal_is_its_diagonal() -> None:
    q, k, v = normal(B, 1, H, K), normal(B, 1, H, K), normal(B, 1, H, V)
    precision, before = torch.rand(B, 1, H, V, dtype=torch.float64), normal(B, H, K, V)
    _, after = reference.longhorn_exact(q, k, v, precision, state=before)
    error = v[:, 0] - torch.einsum("bhkv,bhk->bhv", after, k[:, 0])
    stationarity = (after - before) - torch.einsum("bhk,bhv->bhkv", k[:, 0], precision[:, 0] * error)
    torch.testing.assert_close(stationarity, torch.zeros_like(stationarity), **EXACT)
    # With a single nonzero key entry there is nothing off the diagonal, so the approximation is exact.
    single = torch.zeros_like(k)
    single[..., 1] = k[..., 1]
    exact, _ = reference.longhorn_exact(q, single, v, precision, state=before)
    diagonal, _ = reference.longhorn(q, single, v, precision, state=before)
    torch.testing.assert_close(diagonal, exact, **EXACT)


def rules() -> dict[str, tuple[Callable[..., Any], list[Tensor]]]:
    x = inputs()
    q, k, v, log_decay, write = x.values()
    ridge = torch.rand(H, K, dtype=torch.float64) + 0.25
    return {
        "mesa": (lambda *a, **o: reference.mesa(*a, ridge, **o), [q, k, v, log_decay, write]),
        "mesa_rls": (lambda *a, **o: reference.mesa_rls(*a, ridge, **o), [q, k, v, log_decay, write]),
        "gla": (reference.gated_linear_attention, [q, k, v, log_decay, write]),
        "delta": (reference.gated_delta_rule, [q, k, v, log_decay, write]),
        "mlstm": (reference.mlstm, [q, k, v, log_decay, normal(B, T, H)]),
        "longhorn": (reference.longhorn, [q, k, v, torch.rand(B, T, H, V, dtype=torch.float64)]),
        "longhorn_exact": (reference.longhorn_exact, [q, k, v, torch.rand(B, T, H, V, dtype=torch.float64)]),
        "rg_lru": (reference.rg_lru, [normal(B, T, V), -torch.rand(B, T, V, dtype=torch.float64)]),
    }


@pytest.mark.parametrize("name", sorted(rules()))
def test_split_and_packed_equal_whole(name: str) -> None:
    rule, tensors = rules()[name]
    whole, last = rule(*tensors)
    first, middle = rule(*(tensor[:, :4] for tensor in tensors))
    second, end = rule(*(tensor[:, 4:] for tensor in tensors), state=middle)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole, **EXACT)
    torch.testing.assert_close(end, last, **EXACT)
    # The two rows of the batch, one after the other, with a sequence without tokens between them.
    packed = [torch.cat([tensor[:1], tensor[1:]], dim=1) for tensor in tensors]
    bounds = torch.tensor([0, T, T, 2 * T])
    output, states = rule(*packed, cu_seqlens=bounds)
    torch.testing.assert_close(output[0], whole.flatten(0, 1), **EXACT)
    for part, whole_part in zip(parts(states), parts(last), strict=True):
        torch.testing.assert_close(part[[0, 2]], whole_part, **EXACT)


def parts(state: Any) -> tuple[Tensor, ...]:
    return (state,) if isinstance(state, Tensor) else tuple(state)
