"""Documents cut into windows, and windows gathered into batches of about equal length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mesanet.config.evaluation import EvaluationConfig
from mesanet.errors import UserError
from mesanet.evaluation.documents import Documents, EvaluationData, lengths

IGNORED = -100
Integers = NDArray[np.int64]


class Windows(NamedTuple):
    """Stretches of documents, each a sequence of its own."""

    document: Integers
    """Number of the document [S]."""
    start: Integers
    """Where in the document it starts [S]."""
    tokens: Integers
    """How many tokens it has [S]."""

    def select(self, chosen: Integers) -> Windows:
        """Only these, in this order."""
        return Windows(*(part[chosen] for part in self))


class WindowBatch(NamedTuple):
    """Some windows side by side, filled up at the right."""

    windows: Windows
    """Which."""
    tokens: Integers
    """Inputs [B, T]: BOS, or the token before the window, and then its own but for the last."""
    targets: Integers
    """The window's tokens [B, T], IGNORED where it has ended."""


def plan_windows(data: EvaluationData, config: EvaluationConfig) -> Windows:
    """Cut documents into windows as the config says, in the order of the documents."""
    sizes = lengths(data.documents)
    order = np.arange(len(sizes))
    if config.max_tokens is not None:
        order = np.random.default_rng(config.seed).permutation(order)
    order = order[sizes[order] >= max(config.at_least, config.length if config.whole else 1)]
    counts = sizes[order] // config.length if config.whole else -(-sizes[order] // config.length)
    document = np.repeat(order, counts)
    start = (np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)) * config.length
    windows = Windows(document, start, np.minimum(sizes[document] - start, config.length))
    if config.max_tokens is not None:
        windows = _limit(windows, config.max_tokens)
    if len(windows.document) == 0:
        raise UserError(
            f"{config.data} has no document that is long enough, the longest has {sizes.max(initial=0)} tokens: "
            "take a smaller --at-least, or a smaller --length where only whole windows count"
        )
    return windows


def _limit(windows: Windows, tokens: int) -> Windows:
    """The first windows that together have so many tokens; the last one is shortened."""
    before = np.cumsum(windows.tokens) - windows.tokens
    kept = windows.select(np.flatnonzero(before < tokens))
    return kept._replace(tokens=np.minimum(kept.tokens, tokens - before[: len(kept.tokens)]))


def batches(data: EvaluationData, windows: Windows, piece: int) -> Iterator[WindowBatch]:
    """Give all windows, the longest first, in batches of at most `piece` tokens, or of one window if it is longer."""
    windows = windows.select(np.argsort(-windows.tokens, kind="stable"))
    first = 0
    while first < len(windows.tokens):
        time = int(windows.tokens[first])
        rows = windows.select(np.arange(first, min(first + max(1, piece // time), len(windows.tokens))))
        yield WindowBatch(rows, *_fill(data, rows, time))
        first += len(rows.tokens)


def _fill(data: EvaluationData, windows: Windows, time: int) -> tuple[Integers, Integers]:
    tokens = np.full((len(windows.tokens), time), data.bos, dtype=np.int64)
    targets = np.full_like(tokens, IGNORED)
    for row, (document, start, count) in enumerate(zip(*(part.tolist() for part in windows), strict=True)):
        own = stretch(data.documents, document, start, count)
        targets[row, :count] = own
        tokens[row, 1:count] = own[:-1]
        if start > 0:
            tokens[row, 0] = int(data.documents[document][start - 1])
    return tokens, targets


def stretch(documents: Documents, document: int, start: int, count: int) -> Integers:
    """Tokens `start` to `start + count` of a document."""
    found: Integers = documents[document][start : start + count].astype(np.int64)
    return found
