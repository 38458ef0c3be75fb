"""What only RG-LRU has: spans of time that are scanned side by side, as off the CPU, and very long sequences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mesanet.ops import reference
from mesanet.ops.rg_lru import Plan, ScannedLru, rg_lru

EXACT = {"rtol": 1e-10, "atol": 1e-10}
D = 5


@pytest.mark.parametrize("time", [1, 8, 9, 70])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("block", "span"), [(1000, 8), (1000, 1), (20, 8), (20, None)])
def test_every_plan_gives_the_same(time: int, packed: bool, block: int, span: int | None) -> None:
    bounds = torch.tensor([0, time // 3, time // 3, time]) if packed else None
    batch, rows = (1, 3) if packed else (2, 2)
    x, log_decay = torch.randn(batch, time, D).double(), -torch.rand(batch, time, D).double()
    log_decay[:, time // 2] = -torch.inf
    tensors = [x, log_decay, torch.randn(rows, D).double()]
    for tensor in tensors:
        tensor.requires_grad_()
    ours: list[Tensor] = list(ScannedLru.apply(*tensors, Plan.of(time, bounds, block, span)))
    truth = list(reference.rg_lru(*tensors, bounds))
    weights = [torch.randn_like(result) for result in truth]
    gradients = (torch.autograd.grad(results, tensors, weights) for results in (ours, truth))
    for one, other in [*zip(ours, truth, strict=True), *zip(*gradients, strict=True)]:
        torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize("log_decay", [-1e-9, -1e-3, -30.0])
def test_long_sequences_stay_accurate_in_float32(log_decay: float) -> None:
    """Over 20 000 tokens products of gates run from one to far below the smallest float; no sum of logs is undone."""
    x, gate = torch.randn(1, 20_000, D), torch.full((1, 20_000, D), log_decay)
    exact, _ = rg_lru(x.double(), gate.double())
    single, _ = rg_lru(x, gate)
    spans, _ = ScannedLru.apply(x, gate, torch.zeros(1, D), Plan.of(20_000, None, 20_000, 64))
    for output in (single, spans):
        # exp(-1e-9) is one in float32, which over 20 000 tokens is 2e-5 off; everything else is rounding at random.
        assert (output - exact).norm() <= 3e-5 * exact.norm()
