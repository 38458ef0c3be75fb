"""Rules that refuse numbers which are not finite do not raise in a training step, of which all processes wait."""

from __future__ import annotations

import pytest
import torch

from mesanet.config.model import ModelConfig
from mesanet.mixers import MIXERS
from mesanet.model.backbone import LanguageModel
from mesanet.training.diagnosis import answer_refusals


@pytest.mark.parametrize("name", MIXERS)
def test_weights_that_are_no_numbers_make_a_loss_that_is_none(name: str) -> None:
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(mixers=(name,), layers=1, width=16, heads=2, key_size=8, vocabulary=61))
    answer_refusals(model)
    with torch.no_grad():
        model.embedding.weight.fill_(torch.nan)
    tokens = torch.randint(61, (2, 9))
    loss = model.loss(tokens, tokens)
    loss.backward()
    assert loss.isnan()
    # Processes that average gradients wait for one of each.
    assert all(parameter.grad is not None for parameter in model.parameters())
