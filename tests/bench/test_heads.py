"""The heads that benchmarks run on are what they say they are."""

from __future__ import annotations

import pytest
import torch

from mesanet.bench.heads import GAMMA_RANGES, MesaInputs, mixed_heads, unit_vectors
from mesanet.ops.mesa import mesa
from mesanet.ops.solver import ConjugateGradient

SIZES = {"batch": 2, "time": 300, "key_size": 16, "value_size": 8}


@pytest.mark.parametrize("heads", [4, 8, 6, 1])
def test_each_quarter_of_the_heads_has_its_range_of_gamma(heads: int) -> None:
    inputs = mixed_heads(heads=heads, **SIZES)
    for head in range(heads):
        low, high = GAMMA_RANGES[head * 4 // heads]
        gamma = inputs.log_decay[:, :, head].exp()
        # log and exp each round once, so gamma may leave its range by a few units in the last place.
        assert low - 1e-6 <= gamma.min() <= gamma.max() <= min(high + 1e-6, 1.0)
        if low < high:
            # 600 uniform draws leave 5 % at either end empty with probability 0.95**600 < 1e-13.
            assert gamma.min() < low + 0.05 * (high - low)
            assert gamma.max() > high - 0.05 * (high - low)


@pytest.mark.parametrize("correlated", [False, True])
def test_shapes_norms_and_ranges(correlated: bool) -> None:
    inputs = mixed_heads(heads=4, correlated=correlated, **SIZES)
    assert inputs.q.shape == inputs.k.shape == (2, 300, 4, 16)
    assert inputs.v.shape == (2, 300, 4, 8)
    assert inputs.log_decay.shape == inputs.write.shape == (2, 300, 4)
    assert inputs.ridge.shape == (4, 16)
    for tensor in (inputs.q, inputs.k):
        torch.testing.assert_close(tensor.norm(dim=-1), torch.ones(2, 300, 4))
    assert inputs.write.min() >= 0
    assert inputs.write.max() <= 1
    assert inputs.ridge.min() >= 0.25
    assert inputs.ridge.max() <= 1


@pytest.mark.parametrize("name", ["q", "k"])
def test_correlated_vectors_are_worse_conditioned(name: str) -> None:
    def condition(correlated: bool) -> float:
        vectors = getattr(mixed_heads(heads=1, correlated=correlated, **SIZES), name).flatten(0, 2)
        return torch.linalg.cond(vectors.T @ vectors).item()

    # Eigenvalues 1 ... 1/256 against equal ones, estimated from 600 vectors; making their lengths equal
    # takes from the large ones less than a factor of four.
    assert condition(True) > 256 / 4 / 2
    assert condition(False) < 2


def test_no_axis_is_special() -> None:
    """Correlated vectors lie along axes of their own, so that no diagonal rescaling undoes the correlation."""
    generator = torch.Generator().manual_seed(0)
    vectors = unit_vectors(4000, 16, correlated=True, generator=generator)
    spread = vectors.square().mean(0)
    # Along their own axes the spreads would be 1 to 1/256; the smallest of 16 random mixtures is far above.
    assert float(spread.min() / spread.max()) > 1 / 64


@pytest.mark.parametrize("gamma", [1.0, 0.9975])
def test_correlated_heads_are_too_stiff_for_plain_steps(gamma: float) -> None:
    """What the benchmark draws with correlated keys is the case that the preconditioner is there for."""
    heads = [bounds[0] for bounds in GAMMA_RANGES].index(gamma)
    inputs = mixed_heads(batch=1, time=2048, heads=4, key_size=128, value_size=4, correlated=True)
    own = MesaInputs(*(tensor[:, :, heads : heads + 1] for tensor in inputs[:5]), inputs.ridge[heads : heads + 1])
    with torch.no_grad():
        default = mesa(*own)
        plain = mesa(*own, solver=ConjugateGradient(preconditioner=None))
    assert int(default.steps.max()) <= 4
    assert int(plain.steps.max()) == 30


def test_the_seed_decides() -> None:
    first, again, other = (mixed_heads(heads=4, seed=seed, **SIZES) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.q, other.q)


def test_gates_and_ridge_stay_float32() -> None:
    inputs = mixed_heads(heads=4, dtype=torch.bfloat16, **SIZES)
    assert [tensor.dtype for tensor in inputs] == [torch.bfloat16] * 3 + [torch.float32] * 3


def test_strong_gates_are_a_share_of_the_tokens_and_nothing_else_changes() -> None:
    usual, strong = (mixed_heads(heads=4, strong_gates=share, **SIZES) for share in (0.0, 0.1))
    hit = strong.log_decay != usual.log_decay
    assert torch.equal(hit, hit[:, :, :1].expand_as(hit))
    # 600 draws: five standard deviations about 60.
    assert 23 < int(hit[:, :, 0].sum()) < 97
    torch.testing.assert_close(strong.log_decay.exp()[hit], 0.05 * usual.log_decay.exp()[hit], rtol=1e-5, atol=0)
    for name in ("q", "k", "v", "write", "ridge"):
        assert torch.equal(getattr(usual, name), getattr(strong, name))
