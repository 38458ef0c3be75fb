"""AdamW over the model's own parameter groups, and the norm of its gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mesanet.config.training import TrainingConfig
from mesanet.model.backbone import LanguageModel


def make_optimiser(model: LanguageModel, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW in which only what the model marks as matrices decays."""
    return torch.optim.AdamW(
        model.parameter_groups(config.weight_decay),
        lr=config.start_learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        fused=True,
    )


def set_learning_rate(optimiser: torch.optim.Optimizer, value: float) -> None:
    """Give all groups this learning rate."""
    for group in optimiser.param_groups:
        group["lr"] = value


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The norm of all gradients together, over all processes that hold a part of them."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return whole(torch.nn.utils.get_total_norm(gradients))


def clip_gradients(parameters: Iterable[nn.Parameter], most: float, norm: Tensor) -> None:
    """Scale gradients of this total norm down to the norm `most`, where it is greater."""
    if norm > most:
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], float(most / norm))


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or all of one that is spread over processes, all of which have to ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
