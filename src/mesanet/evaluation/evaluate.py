"""Negative log likelihood of every token of every window, summed by its position."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mesanet.config.base import to_dict
from mesanet.config.evaluation import EvaluationConfig, SolverOverride
from mesanet.errors import UserError
from mesanet.evaluation.documents import EvaluationData
from mesanet.evaluation.solver import StepCounter, counting_steps, solver_override
from mesanet.evaluation.windows import WindowBatch, all_batches
from mesanet.model.backbone import LanguageModel
from mesanet.model.cache import Cache
from mesanet.model.generate import evaluating

ATTENTION_PAIRS = 1 << 24
"""Pairs of a query and a key that full attention looks at together; its mask has as many numbers."""
SMALLEST_PIECE = 32
Floats = NDArray[np.float64]
Tell = Callable[[int], None]


def evaluate(
    model: LanguageModel,
    data: EvaluationData,
    config: EvaluationConfig,
    solver: SolverOverride | None = None,
    tell: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Evaluate a model; the result holds the sum and the count of each position, so that any mean can be made of it.

    `tell` is called with the tokens done and those to do. Memory does not grow with the length of a window, but for
    what the model itself has to remember, such as the keys and values of attention.
    """
    if data.vocabulary > model.config.vocabulary:
        raise UserError(
            f"{config.data} has a vocabulary of {data.vocabulary}, but the model's is only {model.config.vocabulary}: "
            "evaluate it on data of its own tokenizer"
        )
    totals, windows = all_batches(data, config)
    sums = PositionSums(totals.longest)
    started, done = time.perf_counter(), 0

    def count(tokens: int) -> None:
        nonlocal done
        done += tokens
        if tell is not None:
            tell(done, totals.tokens)

    override = solver or SolverOverride()
    with solver_override(model, override) as settings, counting_steps(model) as counter:
        for batch in windows:
            sums.add(batch, _windows_nll(model, batch, config, counter, count))
        steps = counter.record()
    seconds, found = time.perf_counter() - started, sums.record()
    return {
        "data": {"name": data.name, "fingerprint": data.fingerprint, "documents": totals.documents},
        "settings": {**to_dict(config), "data": str(config.data)},
        "override": to_dict(override),
        "solver": settings,
        "steps": steps,
        "seconds": seconds,
        "tokens_per_second": found["summary"]["tokens"] / max(seconds, 1e-9),
        **found,
    }


class PositionSums:
    """Sums and counts by position within a window, and the sum of each window."""

    def __init__(self, length: int) -> None:
        self._sum = np.zeros(length)
        self._count = np.zeros(length, dtype=np.int64)
        self._windows: list[tuple[int, int, int, float]] = []

    def add(self, batch: WindowBatch, nll: Floats) -> None:
        """Take in the likelihoods [B, T] of a batch, which are zero where there is no target."""
        time = nll.shape[1]
        self._sum[:time] += nll.sum(0)
        self._count[:time] += (batch.targets >= 0).sum(0)
        self._windows += zip(*(part.tolist() for part in batch.windows), nll.sum(1).tolist(), strict=True)

    def record(self) -> dict[str, Any]:
        """Everything as plain data, the windows in the order of the documents."""
        windows = sorted(self._windows)
        tokens = int(self._count.sum())
        mean = float(self._sum.sum() / tokens)
        columns = zip(*windows, strict=True)
        return {
            "summary": {"nll": mean, "perplexity": _exponential(mean), "tokens": tokens, "windows": len(windows)},
            "positions": {"sum": self._sum.tolist(), "count": self._count.tolist()},
            "windows": dict(zip(("document", "start", "tokens", "nll"), map(list, columns), strict=True)),
        }


def _windows_nll(
    model: LanguageModel, batch: WindowBatch, config: EvaluationConfig, counter: StepCounter, count: Tell
) -> Floats:
    """[B, T] the negative log likelihood of each target, read piece by piece through the cache."""
    device = model.embedding.weight.device
    nll = np.zeros(batch.tokens.shape)
    cache: Cache | None = None
    begin, rows, length = 0, *batch.tokens.shape
    while begin < length:
        end = min(begin + _piece(model, rows, begin, length, config.piece), length)
        tokens, targets = (torch.from_numpy(part[:, begin:end]).to(device) for part in (batch.tokens, batch.targets))
        counter.counted = targets >= 0
        each, cache = _piece_nll(model, tokens, targets, cache, config.precision)
        nll[:, begin:end] = each.double().cpu().numpy()
        _check_finite(nll[:, begin:end], batch, begin)
        count(nll[:, begin:end].size if config.packed else int((batch.targets[:, begin:end] >= 0).sum()))
        begin = end
    return nll


def _piece_nll(
    model: LanguageModel, tokens: Tensor, targets: Tensor, cache: Cache | None, precision: str
) -> tuple[Tensor, Cache]:
    half = torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16")
    with torch.no_grad(), evaluating(model), half:
        _, each, cache = model.losses(tokens, targets, cache=cache)
    return each, cache


def _piece(model: LanguageModel, rows: int, begin: int, length: int, most: int) -> int:
    """How many tokens of each row to read at once; full attention over a long past takes fewer."""
    piece = max(1, most // rows)
    if "attention" not in model.config.mixers or length <= piece:
        return piece
    return max(SMALLEST_PIECE, min(piece, ATTENTION_PAIRS // (begin + piece)))


def _check_finite(nll: Floats, batch: WindowBatch, begin: int) -> None:
    wrong = np.argwhere(~np.isfinite(nll))
    if len(wrong):
        row, place = wrong[0]
        document, start, _ = (int(part[row]) for part in batch.windows)
        position = start + begin + int(place)
        raise UserError(f"the model's loss is not finite at token {position} of document {document}: it is damaged")


def _exponential(value: float) -> float | None:
    """exp, or None where that is more than JSON holds."""
    return float(np.exp(value)) if value < 700 else None
