"""Multi-query associative recall: every mixer that the paper credits with it learns it in a few minutes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mesanet.config.model import ModelConfig
from mesanet.model.backbone import LanguageModel

PAIRS, LENGTH, HALF = 8, 64, 64
BLANK = 2 * HALF


def recall_batch(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Eight pairs of a key and a value; later each key once more, anywhere, to be answered by its value."""
    keys = torch.rand(rows, HALF, generator=generator).argsort(1)[:, :PAIRS]
    values = torch.rand(rows, HALF, generator=generator).argsort(1)[:, :PAIRS] + HALF
    tokens = torch.full((rows, LENGTH), BLANK)
    targets = torch.full((rows, LENGTH), -100)
    tokens[:, 0 : 2 * PAIRS : 2] = keys
    tokens[:, 1 : 2 * PAIRS : 2] = values
    places = torch.rand(rows, LENGTH - 2 * PAIRS, generator=generator).argsort(1)[:, :PAIRS] + 2 * PAIRS
    return tokens.scatter(1, places, keys), targets.scatter(1, places, values)


def accuracy(model: LanguageModel, generator: torch.Generator) -> float:
    tokens, targets = recall_batch(256, generator)
    model.eval()
    with torch.no_grad():
        right = model(tokens)[0].argmax(-1) == targets
    model.train()
    return right[targets >= 0].float().mean().item()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("name", "steps", "rate"),
    [
        # Its two layers first have to find each other: nothing for some 2000 steps, then all within 200.
        ("attention", 8000, 1e-3),
        ("deltanet", 300, 3e-3),
        ("gated_deltanet", 300, 3e-3),
        ("mesa", 300, 3e-3),
        ("gla", 300, 3e-3),
        ("mlstm", 600, 3e-3),
    ],
)
def test_two_layers_learn_recall(name: str, steps: int, rate: float) -> None:
    """On pairs that it has never seen: 8 out of 64 keys and values in any order are drawn anew for every batch."""
    torch.manual_seed(0)
    config = ModelConfig(mixers=(name,), layers=2, width=128, heads=2, key_size=64, vocabulary=BLANK + 1)
    model = LanguageModel(config)
    optimiser = torch.optim.AdamW(model.parameter_groups(0.1), lr=rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(1, (step + 1) / 50) * (1 - 0.9 * step / steps)
    )
    training, held_out = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    reached = 0.0
    for step in range(1, steps + 1):
        optimiser.zero_grad()
        model.loss(*recall_batch(64, training)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % 50 == 0:
            reached = accuracy(model, held_out)
            if reached > 0.97:
                break
    assert reached > 0.95
