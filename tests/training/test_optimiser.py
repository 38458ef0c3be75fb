from __future__ import annotations

import pytest
import torch

from mesanet.config.model import ModelConfig
from mesanet.config.training import TrainingConfig
from mesanet.model.backbone import LanguageModel
from mesanet.training.optimiser import clip_gradients, gradient_norm, make_optimiser, set_learning_rate

MIXERS = ("mesa", "attention", "hawk", "mlstm", "gated_deltanet", "longhorn")


def small_model() -> LanguageModel:
    return LanguageModel(ModelConfig(mixers=MIXERS, layers=len(MIXERS), width=32, heads=2, key_size=8, vocabulary=64))


def test_weight_decay_is_for_matrices_alone() -> None:
    """No regularisation of embeddings, norms, biases (of gates, too), the ridge and the forget parameters."""
    model = small_model()
    decayed, undecayed = make_optimiser(model, TrainingConfig(steps=3, warmup_steps=0)).param_groups
    assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kept = {names[id(parameter)] for parameter in undecayed["params"]}
    for name, parameter in model.named_parameters():
        special = any(word in name for word in ("norm", "bias", "ridge", "embedding", "forget_parameter"))
        assert (name in kept) == special, name
        assert special or parameter.dim() >= 2, name
    assert sum(len(group["params"]) for group in (decayed, undecayed)) == len(names)


def test_one_update_is_adamw_as_the_paper_sets_it() -> None:
    """The first step moves a weight by -lr * (sign of its gradient + decay * weight)."""
    model = small_model()
    optimiser = make_optimiser(model, TrainingConfig(steps=3, warmup_steps=0))
    set_learning_rate(optimiser, 0.01)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.where(torch.rand_like(parameter) < 0.5, -1.0, 1.0)
    optimiser.step()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        decay = 0.0 if any(word in name for word in ("norm", "bias", "ridge", "embedding", "forget")) else 0.1
        decay = 0.1 if name.endswith("forget_gate.weight") else decay
        expected = before[name] * (1 - 0.01 * decay) - 0.01 * parameter.grad
        # A few roundings of numbers up to six, the largest of the gates' biases.
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [0.5, 40.0])
def test_clipping_scales_all_gradients_together(size: float) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3, 4)), torch.nn.Parameter(torch.zeros(5))]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    norm = gradient_norm(parameters)
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad *= size / norm
    before = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    norm = gradient_norm(parameters)
    torch.testing.assert_close(norm, torch.cat([gradient.flatten() for gradient in before]).norm())
    clip_gradients(parameters, 1.0, norm)
    for parameter, old in zip(parameters, before, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, old * min(1.0, 1 / size))
