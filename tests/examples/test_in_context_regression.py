"""The demo runs, and shows what ridge regression's theory says that it must show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import in_context_regression as demo

SMALL = ["--length", "96", "--sequences", "32", "--input-size", "8", "--output-size", "2", "--noise", "0.1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo")
    demo.run([*SMALL, "--out", str(out)])
    return out


def result(folder: Path, task: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "regression.json").read_text())["results"][task]
    return found


def test_it_leaves_a_figure(folder: Path) -> None:
    assert (folder / "regression.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("task", ["fixed map", "drifting map"])
def test_mesa_is_exact_ridge_regression(folder: Path, task: str) -> None:
    # The read-out G = W H + noise^T X turns a residual r into an output error of G (H + ridge)^-1 r. Its first part is
    # at most |W| |r|, as H (H + ridge)^-1 <= 1; beside |W q|, which is |W|_F / sqrt(8) for a unit query, that is at
    # most sqrt(8) |r|. The second is at most |noise| |r| / (2 sqrt(ridge)) = 0.1 sqrt(96) |r| / 0.2 = 5 |r|.
    assert result(folder, task)["mesa_deviation_from_exact_ridge"] < (8**0.5 + 5) * 1e-4


def test_the_best_rule_wins_on_a_fixed_map(folder: Path) -> None:
    """Ridge regression with the true noise is the Bayes estimate of a Gaussian map: no rule has a lower mean error."""
    found = result(folder, "fixed map")
    mean = {name: sum(curve) / len(curve) for name, curve in found["error"].items()}
    assert mean["Mesa"] < mean["delta rule"] < mean["linear attention"]
    # The Bayes ridge is noise^2 = 0.01, which is in the grid; its neighbours are a factor of 3 away. The largest gamma
    # below 1 still weighs the first of 96 examples by 0.79, too little a difference for 32 sequences to tell.
    assert found["settings"]["Mesa"]["strength"] == 0.01
    assert found["settings"]["Mesa"]["gamma"] >= 0.9975


def test_forgetting_pays_off_on_a_drifting_map(folder: Path) -> None:
    assert result(folder, "drifting map")["settings"]["Mesa"]["gamma"] < 1


def test_the_question_follows_the_answer() -> None:
    """At each token the state may know the examples up to there, and is asked about the next one."""
    options = demo.Options(length=5, sequences=2, input_size=4, output_size=3, noise=0.0)
    task = demo.draw_task(options, 0.0, 0)
    assert torch.equal(task.q[:, :-1], task.k[:, 1:])
    assert torch.equal(task.goal[:, :-1], task.v[:, 1:])
    torch.testing.assert_close(task.k.norm(dim=-1), torch.ones(2, 5, 1))
