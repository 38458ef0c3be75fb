"""How many steps the mesa layers' solvers take while something else runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mesanet.config.evaluation import SolverOverride
from mesanet.errors import UserError
from mesanet.mixers import Observation
from mesanet.mixers.mesa import Mesa
from mesanet.model.backbone import LanguageModel


class StepCounter:
    """Adds up the solver's steps by layer and head, over the tokens that count."""

    def __init__(self) -> None:
        self.counted: Tensor | None = None
        """[B, T] which tokens of the next call count; None for all."""
        self._sums: dict[int, Tensor] = {}
        self._tokens: dict[int, int] = {}

    def __call__(self, seen: Observation) -> None:
        """Take in what one layer did in one call."""
        if seen.steps is None:
            return
        steps = seen.steps.to(torch.float64)
        counted = torch.ones(steps.shape[:2], dtype=torch.bool, device=steps.device)
        counted = counted if self.counted is None else self.counted
        sums = (steps * counted[..., None]).sum((0, 1)).cpu()
        self._sums[seen.layer] = self._sums.get(seen.layer, torch.zeros_like(sums)) + sums
        self._tokens[seen.layer] = self._tokens.get(seen.layer, 0) + int(counted.sum())

    def record(self) -> dict[str, Any] | None:
        """The mean steps of a token, overall and by layer and head; None where nothing is solved."""
        if not self._sums:
            return None
        means = {layer: (self._sums[layer] / max(self._tokens[layer], 1)).tolist() for layer in sorted(self._sums)}
        heads = [value for layer in means.values() for value in layer]
        return {"mean": sum(heads) / len(heads), "by_layer_and_head": {str(layer): m for layer, m in means.items()}}


@contextmanager
def counting_steps(model: LanguageModel) -> Iterator[StepCounter]:
    """Count the solver's steps inside the block, keeping nothing else."""
    counter = StepCounter()
    mixers = model.mixers()
    before = [mixer.observer for mixer in mixers]
    for mixer in mixers:
        mixer.observer = counter
    try:
        yield counter
    finally:
        for mixer, observer in zip(mixers, before, strict=True):
            mixer.observer = observer


@contextmanager
def solver_override(model: LanguageModel, change: SolverOverride) -> Iterator[dict[str, Any] | None]:
    """Let the mesa layers solve differently inside the block; gives the settings in force, or None without a solver."""
    layers = [mixer for mixer in model.mixers() if isinstance(mixer, Mesa)]
    if change.changes_anything and not layers:
        raise UserError(
            f"the model has no mesa layer but {', '.join(model.config.mixers)}: leave the solver's options out"
        )
    before = [mixer.inference_solver for mixer in layers]
    model.set_solver(max_steps=change.max_steps, tolerance=change.tolerance, preconditioner=change.preconditioner)
    try:
        yield None if not layers else _settings(layers[0])
    finally:
        for mixer, solver in zip(layers, before, strict=True):
            mixer.inference_solver = solver


def _settings(layer: Mesa) -> dict[str, Any]:
    solver = layer.inference_solver
    return {"max_steps": solver.max_steps, "tolerance": solver.tolerance, "preconditioner": solver.preconditioner}
