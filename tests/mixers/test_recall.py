"""Multi-query associative recall: every mixer that the paper credits with it learns it in a few minutes."""

from __future__ import annotations

import pytest
import torch

from mesanet.config.model import ModelConfig
from mesanet.data.tasks.recall import RecallTask, recall_accuracy, recall_batch
from mesanet.model.backbone import LanguageModel

TASK = RecallTask(pairs=8, length=64, vocabulary=130, slot_power=1.0)


def accuracy(model: LanguageModel, step: int) -> float:
    """On sequences of a stream of their own, which the model has never seen."""
    tokens, targets = recall_batch(TASK, 256, seed=2, step=step)
    model.eval()
    with torch.no_grad():
        found = recall_accuracy(model(tokens)[0], targets)
    model.train()
    return found


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
    """On pairs that it has never seen: 8 out of 64 keys and 65 values are drawn anew for every batch."""
    torch.manual_seed(0)
    config = ModelConfig(mixers=(name,), layers=2, width=128, heads=2, key_size=64, vocabulary=TASK.vocabulary)
    model = LanguageModel(config)
    optimiser = torch.optim.AdamW(model.parameter_groups(0.1), lr=rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(1, (step + 1) / 50) * (1 - 0.9 * step / steps)
    )
    reached = 0.0
    for step in range(1, steps + 1):
        optimiser.zero_grad()
        model.loss(*recall_batch(TASK, 64, seed=1, step=step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % 50 == 0:
            reached = accuracy(model, step)
            if reached > 0.97:
                break
    assert reached > 0.95
