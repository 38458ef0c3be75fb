"""About the data: how large they are, and how far the frequencies of tokens alone would get."""

from __future__ import annotations

from typing import Any

import numpy as np

from mesanet.data.dataset import Dataset

PART = 1 << 22
"""Tokens that are counted at once: counting needs eight bytes for each."""


def describe_corpus(dataset: Dataset) -> dict[str, Any]:
    """Sizes, and the entropy in nats of a token drawn from both splits together."""
    counts = np.zeros(dataset.vocabulary, dtype=np.int64)
    for split in (dataset.train, dataset.validation):
        for shard in split.shards():
            for start in range(0, len(shard), PART):
                counts += np.bincount(shard[start : start + PART], minlength=len(counts))
    return {
        "name": dataset.folder.resolve().name,
        "fingerprint": dataset.fingerprint,
        "documents": len(dataset.train) + len(dataset.validation),
        "tokens": int(counts.sum()),
        "vocabulary": dataset.vocabulary,
        "unigram_entropy": entropy(counts),
    }


def entropy(counts: np.ndarray[Any, Any]) -> float:
    """- sum p log p of the frequencies that the counts give."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())
