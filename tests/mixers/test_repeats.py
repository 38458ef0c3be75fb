"""One token repeated for hundreds of places: what float32 keeps of the logits then, as docs/models.md says."""

from __future__ import annotations

import pytest
import torch

from mesanet.config.model import ModelConfig, SolverConfig
from mesanet.mixers import MIXERS
from mesanet.model.backbone import LanguageModel

FARTHEST = {"mesa": 5e-2, "mlstm": 1e-2, "gla": 5e-3, "mamba2": 5e-3, "gated_deltanet": 2e-3, "mesa_rls": 1e-3}
"""How far cached and uncached logits may be apart; of all others 1e-4."""


def apart(name: str, dtype: str) -> float:
    """The farthest that logits token by token are from those of one call, over eight repeated tokens in two models."""
    farthest = 0.0
    solver = ModelConfig().inference_solver if dtype == "float32" else SolverConfig(max_steps=500, tolerance=1e-14)
    for seed in (0, 1):
        torch.manual_seed(seed)
        sizes = {"layers": 4, "width": 256, "heads": 2, "key_size": 128, "vocabulary": 257}
        model = LanguageModel(ModelConfig(mixers=(name,), inference_solver=solver, **sizes)).eval()  # type: ignore[arg-type]
        model = model.double() if dtype == "float64" else model
        tokens = torch.randint(257, (4, 700))
        tokens[:, 250:] = torch.tensor([[7], [50], [100], [200]])
        with torch.no_grad():
            whole, _ = model(tokens)
            _, cache = model(tokens[:, :250])
            for place in range(250, 700):
                logits, cache = model(tokens[:, place : place + 1], cache)
                farthest = max(farthest, float((logits - whole[:, place : place + 1]).abs().max()))
    return farthest


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MIXERS)
def test_long_repeats_cost_float32_digits_and_nothing_else(name: str) -> None:
    """Untrained models of four layers; that it is rounding shows in float64, whose unit is 5e8 times smaller."""
    single, double = apart(name, "float32"), apart(name, "float64")
    print(f"{name}: {single:.1e} in float32, {double:.1e} in float64")
    assert single < FARTHEST.get(name, 1e-4)
    assert double < FARTHEST.get(name, 1e-4) * 1e-7
