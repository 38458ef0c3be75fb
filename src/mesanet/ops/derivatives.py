"""A backward pass that has no derivative of its own, and says so."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., tuple[Tensor | None, ...]]


def first_derivative_only(name: str) -> Callable[[Backward], Backward]:
    """Decorate the backward pass of an op of that name: it runs without a graph, and its results cannot be derived.

    PyTorch's own `once_differentiable` does the same, but its complaint names no op.
    """

    def decorate(backward: Backward) -> Backward:
        @wraps(backward)
        def run(ctx: Any, *errors: Tensor) -> tuple[Tensor | None, ...]:
            with torch.no_grad():
                gradients = backward(ctx, *errors)
            if not torch.is_grad_enabled():
                return gradients
            # With create_graph=True the results must have a graph, of which the only node refuses.
            found = [gradient for gradient in gradients if gradient is not None]
            guarded = iter(_Refusal.apply(name, torch.ones((), requires_grad=True), *found))  # type: ignore[no-untyped-call]
            return tuple(None if gradient is None else next(guarded) for gradient in gradients)

        return run

    return decorate


class _Refusal(torch.autograd.Function):
    """The identity, with a backward pass that raises."""

    @staticmethod
    def forward(ctx: Any, name: str, _: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, ...]:
        raise RuntimeError(
            f"{ctx.name}: got a request for second derivatives, expected first ones only, as their backward pass has "
            'no derivative; backend="reference" has derivatives of every order'
        )
