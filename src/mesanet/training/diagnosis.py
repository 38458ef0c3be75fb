"""What to look at when a loss or a gradient is not finite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mesanet.errors import UserError
from mesanet.io import write_json_atomic
from mesanet.model.backbone import LanguageModel
from mesanet.training.checkpoint import gather_weights, write_weights
from mesanet.training.distributed import Processes
from mesanet.training.optimiser import whole


class NonFiniteError(UserError):
    """Training stopped because a loss or gradient was infinite or no number; the text names it and the dump."""


def find_output(model: LanguageModel, module: nn.Module, parts: list[tuple[Tensor, Tensor]]) -> str | None:
    """The first module whose output is not finite in the forward pass over these (tokens, targets), by name."""
    found: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def look(_: nn.Module, __: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if not found and isinstance(tensor, Tensor) and not bool(torch.isfinite(tensor).all()):
                found.append(name)

        return look

    hooks = [child.register_forward_hook(watch(name)) for name, child in model.named_modules() if name]
    try:
        with torch.no_grad():
            for tokens, targets in parts:
                module(tokens, targets)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


def find_parameter(weights: dict[str, Tensor], gradients: dict[str, Tensor]) -> str | None:
    """The first weight, else the first gradient, that is not finite, in words."""
    for kind, tensors in (("the weight", weights), ("the gradient of", gradients)):
        for name, tensor in tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                return f"{kind} {name}"
    return None


def stop(
    run: Path,
    step: int,
    loss: float,
    model: LanguageModel,
    module: nn.Module,
    parts: list[tuple[Tensor, Tensor]],
    processes: Processes,
) -> NonFiniteError:
    """Write down what led here and return the error that says so; every process has to take part."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            full = whole(parameter.grad)
            if processes.first:
                gradients[name] = full.cpu().contiguous()
    weights = gather_weights(model, keep=processes.first)
    output = find_output(model, module, parts)
    folder = run / f"dump_step_{step:08}"

    def write() -> str:
        tensor = find_parameter(weights, {}) or (None if output is None else f"the output of {output}")
        culprit = tensor or find_parameter({}, gradients) or "the loss"
        write_weights(folder / "weights.safetensors", weights)
        write_weights(folder / "gradients.safetensors", gradients)
        batch = {
            "tokens": torch.cat([tokens for tokens, _ in parts]).cpu(),
            "targets": torch.cat([targets for _, targets in parts]).cpu(),
        }
        write_weights(folder / "batch.safetensors", batch)
        norms = {name: str(float(gradient.norm())) for name, gradient in gradients.items()}
        # JSON has no NaN, so these numbers are text.
        report = {"step": step, "tensor": culprit, "loss": str(loss), "gradient_norms": norms}
        write_json_atomic(folder / "report.json", report)
        return culprit

    culprit = processes.from_first(write)
    return NonFiniteError(
        f"training stopped at step {step}: {culprit} is not finite (loss {loss}); no checkpoint was written, the "
        f"weights, the gradients and the batch are in {folder}"
    )
