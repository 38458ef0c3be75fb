"""What to look at when a loss, a gradient or a weight is not finite."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mesanet.errors import UserError
from mesanet.io import write_json_atomic
from mesanet.mixers import HeadMixer, Mixer
from mesanet.model.backbone import LanguageModel
from mesanet.training.checkpoint import gather_weights, write_weights
from mesanet.training.distributed import Processes
from mesanet.training.optimiser import whole
from mesanet.training.told import told

NOT_FINITE = re.compile(r"\b(nan|inf)\b")
"""How an op says that it was given such numbers."""


class NonFiniteError(UserError):
    """Training stopped because a number was infinite or none at all; the text names it and the dump."""


def answer_refusals(model: LanguageModel) -> None:
    """Let a rule that refuses numbers because they are not finite give such numbers instead of raising.

    An exception in one of several processes would leave the others waiting. With a loss that is not finite all of them
    come to the same end, and the cause is looked for and written down.
    """
    for mixer in model.mixers():
        name = "mix" if isinstance(mixer, HeadMixer) else "forward"
        setattr(mixer, name, answering(mixer, getattr(mixer, name)))


def answering(mixer: Mixer, rule: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Any]]:
    """The mixer's rule, giving no numbers where it refuses some for not being finite; its output is like its input."""

    def answer(*given: Any) -> tuple[Tensor, Any]:
        try:
            return rule(*given)
        except ValueError as error:
            if NOT_FINITE.search(str(error)) is None:
                raise
        # Every parameter takes part: processes that average gradients wait for one of each.
        *before, like = takewhile(lambda each: isinstance(each, Tensor), given)
        everything = torch.stack([parameter.sum() for parameter in (*before, *mixer.parameters())]).sum()
        return like + everything * math.nan, None

    return answer


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


def find_tensor(kind: str, tensors: dict[str, Tensor]) -> str | None:
    """The first of these tensors that is not finite, in words."""
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            return f"{kind} {name}"
    return None


def state_is_finite(model: LanguageModel, optimiser: torch.optim.Optimizer) -> bool:
    """Whether all that a checkpoint keeps of this process's part of the weights and the optimiser is finite."""
    tensors = (*model.state_dict().values(), *optimiser_state(model, optimiser).values())
    return bool(torch.stack([torch.isfinite(local(tensor)).all() for tensor in tensors]).all())


def optimiser_state(model: LanguageModel, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's averages, by what they are the average of."""
    words = {"exp_avg": "gradient", "exp_avg_sq": "squared gradient"}
    return {
        f"{words.get(key, key)} of {name}": tensor
        for name, parameter in model.named_parameters()
        for key, tensor in optimiser.state.get(parameter, {}).items()
    }


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def stop(
    run: Path,
    step: int,
    loss: float,
    model: LanguageModel,
    optimiser: torch.optim.Optimizer,
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
    averages = {name: local(tensor) for name, tensor in optimiser_state(model, optimiser).items()}
    # Each process has rows of its own, and the trouble may be in any of them.
    output = first_of(processes.collect(find_output(model, module, parts)))
    average = first_of(processes.collect(find_tensor("the average", averages)))
    batch = gather_batch(parts, processes)
    folder = run / f"dump_step_{step:08}"

    def write() -> str:
        culprit = (
            find_tensor("the weight", weights)
            or (None if output is None else f"the output of {output}")
            or find_tensor("the gradient of", gradients)
            or average
            or ("the norm of the gradient" if math.isfinite(loss) else "the loss")
        )
        write_weights(folder / "weights.safetensors", weights)
        write_weights(folder / "gradients.safetensors", gradients)
        write_weights(folder / "batch.safetensors", batch)
        norms = {name: str(float(gradient.norm())) for name, gradient in gradients.items()}
        # JSON has no NaN, so these numbers are text.
        report = {"step": step, "tensor": culprit, "loss": str(loss), "gradient_norms": norms}
        write_json_atomic(folder / "report.json", report)
        return culprit

    culprit = processes.from_first(write)
    return told(
        NonFiniteError(
            f"training stopped at step {step}: {culprit} is not finite (loss {loss}); no checkpoint of that was "
            f"written, the weights, the gradients and the batch are in {folder}"
        )
    )


def first_of(found: list[str | None]) -> str | None:
    """The first thing that was found, if any was."""
    return next((name for name in found if name is not None), None)


def gather_batch(parts: list[tuple[Tensor, Tensor]], processes: Processes) -> dict[str, Tensor]:
    """The rows of all processes in the order of the batch; nothing where there has been no batch yet."""
    own = [torch.cat(rows).cpu() for rows in zip(*parts, strict=True)]
    everyone = processes.collect(own)
    return {
        name: torch.cat(rows) for name, rows in zip(("tokens", "targets"), zip(*everyone, strict=True), strict=False)
    }
