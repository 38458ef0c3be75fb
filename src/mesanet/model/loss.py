"""Cross entropy over a large vocabulary without ever holding all the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mesanet.model.layers import soft_cap
from mesanet.ops.derivatives import first_derivative_only

CHUNK_ELEMENTS = 2**23
"""Logits held at once, about 32 MiB in float32."""
CHUNK_ROWS = 2**11
"""Tokens whose gradients are added up at once, so that their sum stays far below what float16 can hold."""
IGNORED = -100
"""Targets below zero take no part in the loss; this is the usual one."""


class _ChunkedLoss(torch.autograd.Function):
    """Mean negative log likelihood, whose gradients are computed chunk by chunk on the way forward.

    They are those of the sum: what belongs to a token of thousands would be nothing in float16 if it were divided by
    their number before the loss scale has come, which the backward pass brings.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, embedding: Tensor, targets: Tensor, counted: Tensor, cap: float, differentiate: bool
    ) -> tuple[Tensor, Tensor]:
        dtype = _product_dtype(hidden)
        table = embedding.to(dtype)
        nll = torch.empty_like(counted)
        grad_hidden = torch.empty_like(hidden) if differentiate else None
        grad_embedding = torch.zeros_like(embedding, dtype=counted.dtype) if differentiate else None
        step = min(max(1, CHUNK_ELEMENTS // embedding.shape[0]), CHUNK_ROWS)
        with torch.autocast(hidden.device.type, enabled=False):
            for begin in range(0, hidden.shape[0], step):
                part = slice(begin, begin + step)
                rows = hidden[part].to(dtype)
                target = targets[part].clamp_min(0)[:, None]
                logits = soft_cap(rows @ table.T, cap)
                log_sum = logits.logsumexp(-1, keepdim=True)
                nll[part] = (log_sum - logits.gather(1, target)).squeeze(1)
                if grad_hidden is None or grad_embedding is None:
                    continue
                slope = 1 - (logits / cap).square_()
                grad = logits.sub_(log_sum).exp_()
                grad.scatter_add_(1, target, -torch.ones_like(target, dtype=grad.dtype))
                grad = grad.mul_(slope).mul_(counted[part][:, None]).to(dtype)
                grad_hidden[part] = grad @ table
                if dtype == grad_embedding.dtype:
                    grad_embedding.addmm_(grad.T, rows)
                else:
                    grad_embedding += grad.T @ rows
        count = counted.sum().clamp_min(1)
        ctx.save_for_backward(count, *(grad for grad in (grad_hidden, grad_embedding) if grad is not None))
        ctx.embedding_dtype = embedding.dtype
        ctx.mark_non_differentiable(nll)
        return (nll * counted).sum() / count, nll

    @staticmethod
    @first_derivative_only("chunked_loss", instead="cross entropy of the logits has derivatives of every order")
    def backward(ctx: Any, grad_loss: Tensor, grad_nll: Tensor) -> tuple[Tensor | None, ...]:
        count, grad_hidden, grad_embedding = ctx.saved_tensors
        scale = grad_loss / count
        # A scalar takes on the type of the tensor that it multiplies, and float16 may not hold this one.
        scaled = (grad_hidden.to(count.dtype) * scale).to(grad_hidden.dtype)
        return scaled, (grad_embedding * scale).to(ctx.embedding_dtype), None, None, None, None


def chunked_loss(hidden: Tensor, embedding: Tensor, targets: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Mean negative log likelihood over the targets that are not negative, and that of each token without a gradient.

    hidden [..., D], embedding [vocabulary, D], targets [...]: the likelihood of `targets` under
    cap * tanh(hidden embedding^T / cap). Ignored tokens have zero; without any target the mean is zero.
    """
    flat = targets.reshape(-1)
    counted = (flat >= 0).to(torch.float64 if hidden.dtype == torch.float64 else torch.float32)
    differentiate = torch.is_grad_enabled() and (hidden.requires_grad or embedding.requires_grad)
    rows = hidden.reshape(-1, hidden.shape[-1])
    mean, nll = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        rows, embedding, flat, counted, cap, differentiate
    )
    return mean, (nll * counted).view(targets.shape)


def checked_targets(targets: Tensor, vocabulary: int) -> Tensor:
    """The targets in the type that a lookup takes; what is neither a token id nor below zero is refused."""
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise ValueError(f"targets: got {targets.dtype}, expected integer ids, or {IGNORED} for those to leave out")
    # On a CPU only: elsewhere it would make the processor wait for the device, and the lookup itself complains.
    if targets.device.type == "cpu" and targets.numel() and not torch.compiler.is_compiling():
        high = int(targets.max())
        if high >= vocabulary:
            raise ValueError(f"targets: got {high}, expected ids up to {vocabulary - 1}, the vocabulary")
    return targets.long()


def _product_dtype(hidden: Tensor) -> torch.dtype:
    """What the large products are computed in: autocast's type under autocast."""
    kind = hidden.device.type
    if hidden.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return hidden.dtype
