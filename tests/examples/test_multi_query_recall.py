"""The example trains; and, in a few minutes for each, layers that can recall learn to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples import multi_query_recall as example


def test_it_leaves_a_record_and_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--width", "16", "--heads", "2", "--pairs", "4", "--length", "16", "--vocabulary", "16", "--batch", "4"]
    example.run([*small, "--mixers", "gla", "attention", "--steps", "3", "--out", str(tmp_path)])
    record = json.loads((tmp_path / "recall.json").read_text())
    assert [result["mixer"] for result in record["results"]] == ["gla", "attention"]
    assert all(result["steps"] == 3 and 0 <= result["accuracy"] <= 1 for result in record["results"])
    assert (tmp_path / "recall.png").read_bytes().startswith(b"\x89PNG")
    assert "held-out" in capsys.readouterr().out


def test_pairs_and_length_grow_together() -> None:
    options = example.Options()
    assert [(options.task(pairs).pairs, options.task(pairs).length) for pairs in (2, 4, 8, 16)] == [
        (2, 16),
        (4, 32),
        (8, 64),
        (8, 64),
    ]


def test_unknown_mixers_are_refused() -> None:
    with pytest.raises(ValueError, match="mixers"):
        example.Options(mixers=("abacus",))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mixer", ["attention", "gla", "mlstm", "deltanet", "gated_deltanet", "mesa"])
def test_two_layers_learn_recall(mixer: str) -> None:
    """Eight pairs in 64 tokens, on sequences that it has never seen; chance is one in eight for knowing the values."""
    assert example.train(example.Options(enough=0.97), mixer)["accuracy"] > 0.95
