"""Generation: prompts in, one token per step and row out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from mesanet.config.generation import GenerationConfig
from mesanet.errors import UserError
from mesanet.model.backbone import LanguageModel
from mesanet.model.cache import Cache
from mesanet.model.sampling import Sampler

Prompts = Sequence[Sequence[int]]
DEFAULTS = GenerationConfig()


class Step(NamedTuple):
    """The tokens of one step, of the sequences that are still going."""

    rows: list[int]
    """Which prompts these tokens continue."""
    tokens: list[int]
    """One token for each."""


def generate(
    model: LanguageModel, prompts: Prompts, config: GenerationConfig = DEFAULTS, cache: Cache | None = None
) -> list[list[int]]:
    """Continue every prompt; returns the new tokens of each. `cache` holds what came before, a row for each prompt."""
    generated: list[list[int]] = [[] for _ in prompts]
    for step in stream(model, prompts, config, cache):
        for row, token in zip(step.rows, step.tokens, strict=True):
            generated[row].append(token)
    return generated


def stream(
    model: LanguageModel, prompts: Prompts, config: GenerationConfig = DEFAULTS, cache: Cache | None = None
) -> Iterator[Step]:
    """Continue every prompt, and yield the tokens as they come. A sequence that has ended leaves the batch.

    Prompts and stop ids that the model does not know are refused by the call itself, not with the first token.
    """
    _check_stop_ids(config, model)
    if len(prompts) == 0 or config.max_tokens == 0:
        return iter(())
    return _stream(model, pad_left(prompts, model), Sampler(config, prompts), cache)


def _stream(
    model: LanguageModel, prompts: tuple[Tensor, Tensor | None], sampler: Sampler, cache: Cache | None
) -> Iterator[Step]:
    """The steps of padded prompts."""
    config, rows = sampler.config, list(range(prompts[0].shape[0]))
    logits, cache = prefill(model, *prompts, config.prefill_chunk, cache)
    for count in range(1, config.max_tokens + 1):
        tokens = sampler.choose(logits, rows)
        chosen = tokens.tolist()
        going = [place for place, token in enumerate(chosen) if token not in config.stop_ids]
        if len(going) < len(rows):
            if not going:
                return
            kept = torch.tensor(going, device=tokens.device)
            rows, tokens, cache = [rows[place] for place in going], tokens[kept], cache.select(kept)
            chosen = [chosen[place] for place in going]
        yield Step(list(rows), chosen)
        if count < config.max_tokens:
            logits, cache = _advance(model, tokens[:, None], cache, None)


def prefill(
    model: LanguageModel, tokens: Tensor, mask: Tensor | None, chunk: int, cache: Cache | None = None
) -> tuple[Tensor, Cache]:
    """Read [B, T] in pieces of `chunk` tokens; the logits [B, vocabulary] after the last one, and the cache."""
    logits = None
    for begin in range(0, tokens.shape[1], chunk):
        part = slice(begin, begin + chunk)
        logits, cache = _advance(model, tokens[:, part], cache, None if mask is None else mask[:, part])
    assert logits is not None
    assert cache is not None
    return logits, cache


def pad_left(prompts: Prompts, model: LanguageModel) -> tuple[Tensor, Tensor | None]:
    """Prompts of different lengths as tokens [B, T] with the padding at the left, and a mask that is false there."""
    vocabulary = model.config.vocabulary
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompts: number {row} is empty; begin it with at least one token, such as BOS")
        if not all(0 <= token < vocabulary for token in prompt):
            raise ValueError(f"prompts: number {row} has a token outside the vocabulary of {vocabulary}")
    longest = max(len(prompt) for prompt in prompts)
    device = model.embedding.weight.device
    tokens = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    if all(len(prompt) == longest for prompt in prompts):
        return tokens, None
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    return tokens, torch.arange(longest, device=device) >= padding[:, None]


def _check_stop_ids(config: GenerationConfig, model: LanguageModel) -> None:
    """Refuse a token to stop at that can never come."""
    vocabulary = model.config.vocabulary
    for token in config.stop_ids:
        if token >= vocabulary:
            raise ValueError(f"stop_ids: got {token}, expected ids from 0 to {vocabulary - 1}, the vocabulary")


def _advance(model: LanguageModel, tokens: Tensor, cache: Cache | None, mask: Tensor | None) -> tuple[Tensor, Cache]:
    """One forward pass in inference mode of the solver, without a graph; the logits after the last token."""
    with torch.no_grad(), evaluating(model):
        logits, cache = model(tokens, cache, mask=mask, last=1)
    return logits[:, -1], cache


@contextmanager
def evaluating(model: LanguageModel) -> Iterator[None]:
    """Evaluation mode, and afterwards the mode from before; what a rule refuses as no number is the model's fault."""
    training = model.training
    if training:
        model.eval()
    try:
        yield
    except ValueError as error:
        if re.search(r"\bnan\b", str(error)) is None:
            raise
        raise UserError(f"the model's numbers are not finite: it has diverged or is damaged ({error})") from error
    finally:
        if training:
            model.train()
