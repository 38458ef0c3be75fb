"""Choosing the next token."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mesanet.config.generation import GenerationConfig


class Sampler:
    """Chooses tokens for the rows of a batch; each row has its own stream of random numbers."""

    def __init__(self, config: GenerationConfig, prompts: Sequence[Sequence[int]]) -> None:
        self.config = config
        self._random = [random.Random(name) for name in stream_names(config.seed, prompts)]

    def choose(self, logits: Tensor, rows: list[int]) -> Tensor:
        """[B] tokens for these rows from logits [B, vocabulary]."""
        best = logits.max(dim=-1).values
        if not bool(best.isfinite().all()):
            # Of such a row the first token would be taken without end, or one that there is not.
            raise ValueError(f"the model's logits are not numbers ({best.tolist()} at best): it has diverged")
        if self.config.temperature == 0:
            return logits.argmax(dim=-1)
        likely, tokens = truncated(logits, self.config).sort(dim=-1, descending=True, stable=True)
        sums = likely.to(torch.float64).softmax(dim=-1).cumsum(dim=-1)
        draws = torch.tensor([[self._random[row].random()] for row in rows], dtype=torch.float64)
        # Scaled by the last sum, which rounding keeps from being exactly one, so that a draw always falls on a token.
        drawn = torch.searchsorted(sums, draws.to(sums.device) * sums[:, -1:], right=True)
        allowed = (likely > -torch.inf).sum(dim=-1, keepdim=True)
        return tokens.gather(1, torch.minimum(drawn, allowed - 1)).squeeze(1)


def stream_names(seed: int, prompts: Sequence[Sequence[int]]) -> Iterator[str]:
    """What the random numbers of each prompt depend on: the seed, its tokens, and how many equal ones came before.

    The place in the batch is not part of it, so that a prompt gets the same numbers whatever it shares a batch with.
    """
    equal: Counter[str] = Counter()
    for prompt in prompts:
        tokens = ",".join(str(int(token)) for token in prompt)
        yield f"{seed}:{equal[tokens]}:{tokens}"
        equal[tokens] += 1


def truncated(logits: Tensor, config: GenerationConfig) -> Tensor:
    """Logits over the temperature, with minus infinity where top_k or top_p rule a token out."""
    # The largest first becomes zero: a tiny temperature then takes the others to minus infinity, and nothing to NaN.
    logits = (logits.double() - logits.max(dim=-1, keepdim=True).values) / config.temperature
    if config.top_k is not None and config.top_k < logits.shape[-1]:
        # By place rather than by size, or all that are as likely as the last of them would stay.
        kept = logits.topk(config.top_k, dim=-1)
        logits = torch.full_like(logits, -torch.inf).scatter(1, kept.indices, kept.values)
    if config.top_p is not None and config.top_p < 1:
        ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
        probabilities = ordered.softmax(dim=-1)
        # A token stays if those before it do not reach top_p yet.
        excluded = probabilities.cumsum(dim=-1) - probabilities >= config.top_p
        # Nothing comes before the most likely one, which rounding may deny where top_p is tiny.
        excluded[:, 0] = False
        logits = logits.masked_fill(excluded.scatter(1, tokens, excluded), -torch.inf)
    return logits
