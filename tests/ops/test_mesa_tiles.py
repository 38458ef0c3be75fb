"""The Mesa rule whatever its tiles: states and their gradients are carried from one to the next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.ops.mesa_cases import EXACT, Inputs, gradients, make_inputs

from mesanet.ops import mesa_chunked, reference
from mesanet.ops.mesa import mesa
from mesanet.ops.mesa_problems import Problems, Slow
from mesanet.ops.mesa_tiles import plan_tiles
from mesanet.ops.solver import ConjugateGradient

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


@pytest.mark.parametrize("fitting", [1, 3, 8, 20])
@pytest.mark.parametrize("kind", ["rows", "packed", "signed"])
def test_tiles_of_any_size_are_the_reference(kind: str, fitting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows of five chunks and three heads, or five sequences of which one is empty, in up to 45 tiles."""
    monkeypatch.setattr(mesa_chunked, "problems_at_once", lambda *_: fitting)
    options, sequences, ridge = {}, None, (0.25, 1.0)
    if kind == "packed":
        options["cu_seqlens"] = torch.tensor([0, 150, 151, 151, 215, 300])
        sequences = 5
    if kind == "signed":
        ridge = (50.0, 60.0)
        options["sign"] = torch.where(torch.rand(3, 300, 3) < 0.5, -1.0, 1.0).double()
    batch = 1 if kind == "packed" else 3
    inputs = make_inputs(batch, 300, 3, 6, 4, sequences=sequences, ridge=ridge).with_grad()
    assert_is_the_reference(inputs, options)


@pytest.mark.parametrize("fitting", [1, 5, 12, 1000])
def test_every_problem_is_in_one_tile_that_is_not_too_large(fitting: int) -> None:
    chunks, heads, rows = 7, 5, 3
    seen = torch.zeros(chunks, heads, rows)
    problems = starts = 0
    for group in plan_tiles(torch.randn(chunks, heads, rows), fitting):
        before = 0
        for tile in group:
            assert tile.chunks.start == before, "a group's tiles follow one another"
            before = tile.chunks.stop
            long, many, deep = tile.grid
            assert long * many * deep <= fitting
            assert (tile.problems.start, tile.starts.start) == (problems, starts)
            problems, starts = tile.problems.stop, tile.starts.stop
            seen[tile.chunks, list(tile.heads), tile.rows] += 1
        assert before == chunks
    assert bool((seen == 1).all())


def test_heads_that_forget_alike_share_a_tile() -> None:
    kept = torch.tensor([0.0, -9.0, -0.1, -8.0, -0.2, -7.0, -0.3, -6.0]).view(1, 8, 1).expand(4, 8, 2)
    groups = plan_tiles(kept, 32)
    for group in groups:
        assert len(group[0].heads) == 2
        assert len({head % 2 for head in group[0].heads}) == 1


@pytest.mark.parametrize("kind", ["rows", "packed", "signed"])
def test_tiles_of_several_heads_are_the_reference(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve heads in an order that has nothing to do with how much they forget; slow and fast ones share tiles."""
    options, sequences, batch, ridge = {}, None, 2, (0.25, 1.0)
    if kind == "packed":
        options["cu_seqlens"], sequences, batch = torch.tensor([0, 70, 70, 135, 200]), 4, 1
    if kind == "signed":
        options["sign"], ridge = torch.where(torch.rand(2, 200, 12) < 0.5, -1.0, 1.0).double(), (50.0, 60.0)
    inputs = make_inputs(batch, 200, 12, 5, 3, sequences=sequences, ridge=ridge)
    rates = torch.linspace(-0.2, 0.0, 12, dtype=torch.float64)[torch.randperm(12)]
    inputs = inputs._replace(log_decay=rates.expand(batch, 200, 12)).with_grad()
    kept = 50 * rates.view(1, 12, 1).expand(4, 12, batch)
    tiles = [tile for group in plan_tiles(kept, 1000) for tile in group]
    assert max(len(tile.heads) for tile in tiles) > 1
    assert any(tile.heads != tuple(range(tile.heads[0], tile.heads[-1] + 1)) for tile in tiles)
    slow = noted_slow(monkeypatch)
    assert_is_the_reference(inputs, options)
    assert kind == "signed" or any(0 < len(own.problems) < problems for problems, own in slow)


@pytest.mark.parametrize("gates", [(-1.5,), (-3.0,), (-5.0,), (-1.0, -1.5, -3.0, -float("inf"))])
def test_strong_gates_in_slow_heads_are_the_reference(
    gates: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks whose tokens are on several levels, of which some are stiff and some are not."""
    inputs = make_inputs(2, 300, 3, 40, 3, gamma=(1.0, 1.0), ridge=(0.01, 0.02), correlated=True)
    strong = torch.tensor(gates, dtype=torch.float64)[torch.randint(len(gates), (2, 300, 3))]
    log_decay = torch.where(torch.rand(2, 300, 3) < 0.02, strong, torch.zeros((), dtype=torch.float64))
    slow = noted_slow(monkeypatch)
    # With condition numbers of up to 1e5, a residual of 1e-15 is an error of 1e-10.
    assert_is_the_reference(inputs._replace(log_decay=log_decay).with_grad(), {}, replace(EXACT, tolerance=1e-15))
    assert any(not bool(own.tokens.all()) for _, own in slow)
    assert len(gates) == 1 or any(len(own.problems) > problems for problems, own in slow)


def noted_slow(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Slow]]:
    """For every tile with something slow in it: how many problems it has, and what is slow."""
    noted: list[tuple[int, Slow]] = []
    find = Problems.slow

    def note(problems: Problems) -> Slow | None:
        slow = find(problems)
        if slow is not None:
            noted.append((len(problems.keys), slow))
        return slow

    monkeypatch.setattr(Problems, "slow", note)
    return noted


def assert_is_the_reference(inputs: Inputs, options: dict[str, Any], solver: ConjugateGradient = EXACT) -> None:
    """Outputs, states and all gradients."""
    got = mesa(*inputs[:6], inputs.state, solver=solver, **options)
    expected, after = reference.mesa(*inputs[:6], inputs.state, **options)
    torch.testing.assert_close(got.output, expected, **CLOSE)
    torch.testing.assert_close(got.state.kk, after.kk, **CLOSE)
    torch.testing.assert_close(got.state.kv, after.kv, **CLOSE)
    grad_output = torch.randn_like(expected)
    ours = gradients(inputs, got.output, got.state, grad_output)
    theirs = gradients(inputs, expected, after, grad_output)
    for one, another in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, another, **CLOSE)
