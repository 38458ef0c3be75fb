"""Documents cut into windows, and windows gathered into batches of about equal length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mesanet.config.evaluation import EvaluationConfig
from mesanet.data.dataset import Split
from mesanet.data.packing import IGNORED, PackedSequences, as_batch
from mesanet.errors import UserError
from mesanet.evaluation.documents import Documents, EvaluationData, lengths

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


class Totals(NamedTuple):
    """How much there is to evaluate."""

    tokens: int
    """All of it, BOS included where windows are packed."""
    longest: int
    """Tokens of the longest window."""
    documents: int | None
    """Documents it comes from; None where windows are packed from any."""


class WindowBatch(NamedTuple):
    """Some windows side by side, filled up at the right."""

    windows: Windows
    """Which."""
    tokens: Integers
    """Inputs [B, T]: BOS, or the token before the window, and then its own but for the last."""
    targets: Integers
    """The window's tokens [B, T], IGNORED where it has ended."""


def all_batches(data: EvaluationData, config: EvaluationConfig) -> tuple[Totals, Iterator[WindowBatch]]:
    """What there is to evaluate, and its batches of at most `config.piece` tokens, or of one window if it is longer."""
    if config.packed:
        return packed_batches(data, config)
    windows = plan_windows(data, config)
    totals = Totals(int(windows.tokens.sum()), int(windows.tokens.max()), len(np.unique(windows.document)))
    return totals, batches(data, windows, config.piece)


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
        windows = _first_whole(windows, config.max_tokens) if config.whole else _first(windows, config.max_tokens)
    if len(windows.document) == 0:
        raise UserError(
            f"{config.data} has no document that is long enough, the longest has {sizes.max(initial=0)} tokens: "
            "take a smaller --at-least, or a smaller --length where only whole windows count"
        )
    return windows


def _first_whole(windows: Windows, tokens: int) -> Windows:
    """The first windows that together have at most so many tokens."""
    return windows.select(np.flatnonzero(np.cumsum(windows.tokens) <= tokens))


def _first(windows: Windows, tokens: int) -> Windows:
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


def packed_batches(data: EvaluationData, config: EvaluationConfig) -> tuple[Totals, Iterator[WindowBatch]]:
    """The sequences into which validation would pack these documents, each a window that is numbered as a document."""
    documents = data.documents if isinstance(data.documents, Split) else EndToEnd(data.documents)
    packed = PackedSequences(documents, data.bos, config.length, config.seed, once=True)
    count = packed.epoch_sequences()
    if config.max_tokens is not None:
        count = min(count, config.max_tokens // config.length)
    rows = max(1, config.piece // config.length)

    def give() -> Iterator[WindowBatch]:
        for first in range(0, count, rows):
            numbers = np.arange(first, min(first + rows, count))
            tokens, targets = as_batch(packed.sequences(numbers), data.bos)
            yield WindowBatch(Windows(numbers, np.zeros_like(numbers), (targets >= 0).sum(1)), tokens, targets)

    return Totals(count * config.length, config.length, None), give()


class EndToEnd:
    """Documents as packing reads them."""

    def __init__(self, documents: Documents) -> None:
        found = [documents[number] for number in range(len(documents))]
        self._tokens = np.concatenate(found)
        self._ends = np.cumsum([len(tokens) for tokens in found], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def bounds(self, documents: Integers) -> Integers:
        """Where documents start and end [2, ...]."""
        starts = np.concatenate([[0], self._ends[:-1]])
        return np.stack([starts[documents], self._ends[documents]])

    def slice(self, start: int, end: int) -> NDArray[Any]:
        """The tokens in between."""
        found: NDArray[Any] = self._tokens[start:end]
        return found
