"""Multi-query associative recall: what a batch must look like, and that it depends on its arguments alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mesanet.data.packing import IGNORED
from mesanet.data.tasks.recall import FILLER, RecallTask, recall_accuracy, recall_batch

TASK = RecallTask(pairs=5, length=32, vocabulary=41)


@pytest.mark.parametrize("random_filler", [False, True])
def test_every_key_returns_once_and_is_answered_by_its_value(random_filler: bool) -> None:
    task = RecallTask(pairs=5, length=32, vocabulary=41, random_filler=random_filler)
    tokens, targets = recall_batch(task, 200, seed=3, step=7)
    assert tokens.shape == targets.shape == (200, 32)
    for row, target in zip(tokens.tolist(), targets.tolist(), strict=True):
        keys, values = row[0:10:2], row[1:10:2]
        assert len(set(keys)) == len(set(values)) == 5
        assert all(1 <= key < 20 for key in keys)
        assert all(20 <= value < 41 for value in values)
        asked = [place for place, answer in enumerate(target) if answer != IGNORED]
        assert len(asked) == 5
        assert all(place >= 10 and place % 2 == 0 for place in asked)
        answers = {row[place]: target[place] for place in asked}
        assert answers == dict(zip(keys, values, strict=True))
        rest = [token for place, token in enumerate(row) if place >= 10 and place not in asked]
        assert random_filler or set(rest) == {FILLER}


def test_every_key_value_and_slot_occurs_and_early_slots_more_often() -> None:
    tokens, targets = recall_batch(TASK, 2000, seed=0, step=0)
    assert set(tokens[:, 0:10:2].unique().tolist()) == set(range(1, 20))
    assert set(tokens[:, 1:10:2].unique().tolist()) == set(range(20, 41))
    asked = (targets != IGNORED).double().mean(0)[10::2]
    # The first of 11 slots has a weight of 1, the last of 11^-0.99: of 2000 rows, about 1900 and 560 draw them.
    assert asked[0] > 2 * asked[-1] > 0
    even = RecallTask(pairs=5, length=32, vocabulary=41, slot_power=1.0)
    _, targets = recall_batch(even, 2000, seed=0, step=0)
    asked = (targets != IGNORED).double().mean(0)[10::2]
    # Six standard deviations of a share of 5/11 over 2000 rows.
    assert (asked - 5 / 11).abs().max() < 6 * (5 / 11 * 6 / 11 / 2000) ** 0.5


def test_order_of_the_queries_says_nothing() -> None:
    """The first pair is asked for first as often as any other."""
    tokens, targets = recall_batch(TASK, 2000, seed=1, step=0)
    first = (targets != IGNORED).double().argmax(1)
    asked = tokens.gather(1, first[:, None])
    share = (tokens[:, 0:10:2] == asked).double().mean(0)
    assert (share - 1 / 5).abs().max() < 6 * (1 / 5 * 4 / 5 / 2000) ** 0.5


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    batches = {(seed, step): recall_batch(TASK, 4, seed=seed, step=step).tokens for seed in (0, 1) for step in (0, 1)}
    torch.manual_seed(5)
    for (seed, step), tokens in batches.items():
        assert torch.equal(tokens, recall_batch(TASK, 4, seed=seed, step=step).tokens)
    assert len({tuple(tokens.flatten().tolist()) for tokens in batches.values()}) == 4


def test_accuracy_counts_queries_only() -> None:
    _, targets = recall_batch(TASK, 8, seed=0, step=0)
    logits = torch.zeros(8, 32, 41)
    logits.scatter_(2, targets.clamp(min=0)[..., None], 1.0)
    assert recall_accuracy(logits, targets) == 1.0
    assert recall_accuracy(-logits, targets) == 0.0


@pytest.mark.parametrize(
    ("wrong", "field"),
    [({"pairs": 0}, "pairs"), ({"pairs": 8, "length": 31}, "length"), ({"pairs": 8, "vocabulary": 17}, "vocabulary")],
)
def test_impossible_tasks_are_refused(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        RecallTask(**wrong)
    RecallTask(pairs=8, length=32, vocabulary=18)
