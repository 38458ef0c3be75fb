"""A whole comparison, by one process and by two, of models that take a second each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.compare.tiny import add_preset, tiny_comparison
from tests.training.tiny import losses, prepare_tiny

from mesanet.compare import compare
from mesanet.report.comparison import read_comparison
from mesanet.training.presets import RUNS

REPOSITORY = Path(__file__).parents[2]
pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = prepare_tiny(tmp_path_factory.mktemp("tiny"))
    add_preset(folder)
    yield folder
    del RUNS["tiny"]


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "out"
    compare(tiny_comparison(out), command=["first"], quiet=True)
    return out


def plan(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "compare.json").read_text())
    return found


def test_one_process(alone: Path) -> None:
    runs = read_comparison(alone).runs
    assert [run.mixers for run in runs] == ["mesa", "attention"]
    for run in runs:
        assert run.position is not None
        assert run.extrapolation is not None
        assert run.position["command"] == ["first"]
        assert run.sample is not None
        assert run.sample["text"]
        assert len(run.training) == 12
    assert [len(run.solver) for run in runs] == [3, 0]
    # The paper's fixed steps are of the plain method; a tolerance is for the solver as the model has it.
    told = {(each["override"]["max_steps"], each["override"]["tolerance"]): each for each in runs[0].solver}
    assert {key: record["solver"]["preconditioner"] for key, record in told.items()} == {
        (0, 0.0): None,
        (2, 0.0): None,
        (None, 0.1): "auto",
    }
    page = (alone / "report" / "index.html").read_text()
    assert page.count("<svg") == 5
    assert "2 sequence layers on the same tokens" in page


def test_the_same_again_and_one_more(alone: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in alone.glob("runs/*/evaluations/*.json")}
    assert len(before) == 2 * 2 + 3
    compare(tiny_comparison(alone, mixers=("gla",), accumulation=2), command=["second"], quiet=True)
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in before.items())
    assert [each["command"] for each in plan(alone)["history"]] == [["first"], ["second"]]
    page = (alone / "report" / "index.html").read_text()
    assert "3 sequence layers" in page
    for word in ("first", "second"):
        assert f"Command: <code>{word}</code>" in page


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_give_the_comparison_of_one(data: Path, alone: Path, tmp_path: Path, parallel: str) -> None:
    script = [str(REPOSITORY / "tests" / "compare" / "tiny.py"), str(data), "compare", "tiny"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *script]
    options = ["--mixers", "mesa", "attention", "--out", str(tmp_path), "--longest", "2", "--parallel", parallel]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    # The second time everything is there already.
    for _ in range(2):
        done = subprocess.run(
            [*launcher, *options], capture_output=True, text=True, timeout=280, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == [str(tmp_path / "report" / "index.html")]
    assert len(plan(tmp_path)["history"]) == 1
    assert plan(tmp_path)["machine"].startswith("2 x ")
    together, single = ({run.mixers: run for run in read_comparison(out).runs} for out in (tmp_path, alone))
    for name in ("mesa", "attention"):
        # Two processes add up the same float64 numbers in another order: 1e-15 of a loss of 6 in a step, and 12 steps.
        assert losses(tmp_path / "runs" / name) == pytest.approx(losses(alone / "runs" / name), abs=1e-9)
        assert len(together[name].solver) == len(single[name].solver)
        ours, theirs = (runs[name].position for runs in (together, single))
        assert ours is not None
        assert theirs is not None
        assert ours["summary"]["tokens"] == theirs["summary"]["tokens"]
        assert ours["summary"]["nll"] == pytest.approx(theirs["summary"]["nll"], abs=1e-9)
        for mine, other in zip(together[name].solver, single[name].solver, strict=True):
            assert mine["override"] == other["override"]
            assert mine["summary"]["nll"] == pytest.approx(other["summary"]["nll"], abs=1e-9)
