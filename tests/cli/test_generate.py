"""`mesanet generate` and `mesanet model`, as a user calls them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mesanet.config.model import ModelConfig
from mesanet.model.backbone import LanguageModel
from mesanet.model.files import save_model


def mesanet(*words: str, stdin: str = "", encoding: str = "utf-8") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mesanet", *words],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = ModelConfig(mixers=("hawk", "mesa"), layers=2, width=32, heads=2, key_size=16, vocabulary=257)
    folder = tmp_path_factory.mktemp("run")
    save_model(LanguageModel(config), folder / "checkpoints" / "step-1")
    return folder


def test_text_is_continued_and_a_seed_repeats_it(run_folder: Path) -> None:
    words = ["generate", "--model", str(run_folder), "--generation.max-tokens", "20"]
    first = mesanet(*words, "--prompt", "Hello")
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("Hello")
    assert len(first.stdout) > 10
    assert mesanet(*words, "--prompt", "-", stdin="Hello").stdout == first.stdout


def test_an_output_without_the_characters_replaces_them(run_folder: Path) -> None:
    """Random weights make bytes that are no text, whose sign ASCII does not have."""
    words = ["generate", "--model", str(run_folder), "--generation.max-tokens", "40", "--prompt", "\u00e4"]
    result = mesanet(*words, encoding="ascii")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("?")


def test_the_solver_can_be_chosen(run_folder: Path) -> None:
    words = ["generate", "--model", str(run_folder), "--generation.temperature", "0", "--prompt", "Hello there"]
    limited = ["--solver.max-steps", "0", "--solver.preconditioner", "none"]
    assert mesanet(*words, *limited).stdout != mesanet(*words).stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "absent"], "absent is no folder"),
        (["--model", "RUN", "--tokenizer", "gtp2"], "there is no tokenizer"),
        (["--model", "RUN", "--device", "gpu"], "device: got 'gpu'"),
        (["--model", "RUN", "--tokenizer", "gpt2"], "trained with another tokenizer"),
        (["--model", "RUN", "--generation.stop-ids", "257"], "stop_ids: got 257, expected ids from 0 to 256"),
    ],
)
def test_mistakes_are_one_sentence_and_code_2(run_folder: Path, words: list[str], message: str) -> None:
    result = mesanet("generate", "--prompt", "Hello", *[word.replace("RUN", str(run_folder)) for word in words])
    assert result.returncode == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_parameters_are_counted() -> None:
    result = mesanet("model", "parameters", "--presets", "small", "--mixers", "attention", "hawk-mesa")
    assert result.returncode == 0, result.stderr
    assert "| attention | 145,967,616 (+0.00%) |" in result.stdout
    assert len(result.stdout.splitlines()) == 4
