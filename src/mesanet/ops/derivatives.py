"""A backward pass that has no derivative of its own, and says so."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., tuple[Tensor | None, ...]]


def first_derivative_only(
    name: str, instead: str = 'backend="reference" has derivatives of every order'
) -> Callable[[Backward], Backward]:
    """Decorate the backward pass of an op of that name: it refuses to take part in a graph of gradients.

    `instead` says what has higher derivatives.

    PyTorch's own `once_differentiable` refuses later, when the graph is used, and not always: where the incoming
    gradient has no graph itself, as that of a sum, or where `torch.autograd.grad` is asked for some tensors only, it
    gives the results as constants, and what is derived from them is silently wrong.
    """

    def decorate(backward: Backward) -> Backward:
        @wraps(backward)
        def run(ctx: Any, *errors: Tensor) -> tuple[Tensor | None, ...]:
            # PyTorch enables gradients in a backward pass for create_graph=True, and for nothing else.
            if torch.is_grad_enabled():
                raise RuntimeError(
                    f"{name}: got a request for second derivatives (create_graph=True), expected first ones only, as "
                    f"their backward pass has no derivative; {instead}"
                )
            return backward(ctx, *errors)

        return run

    return decorate
