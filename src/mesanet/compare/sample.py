"""A sample of generated text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mesanet.config.compare import CompareConfig
from mesanet.config.generation import GenerationConfig
from mesanet.data.dataset import Dataset
from mesanet.evaluation.run import describe_model, provenance
from mesanet.io import read_record, write_json_atomic
from mesanet.model.backbone import LanguageModel
from mesanet.model.files import find_model, load_model
from mesanet.model.generate import stream
from mesanet.report import shapes
from mesanet.report.comparison import SAMPLE


def write_sample(
    run: Path, dataset: Dataset, config: CompareConfig, device: str, command: Sequence[str] | None = None
) -> dict[str, Any]:
    """Let a run's model continue the prompt, unless its weights have done so already."""
    model_folder = find_model(run)
    model = load_model(model_folder, device=device)
    about = describe_model(model, model_folder, run)
    path = run / SAMPLE
    if path.exists():
        before: dict[str, Any] = read_record(path, shapes.SAMPLE)
        if before["model"]["weights_sha256"] == about["weights_sha256"]:
            return before
    tokenizer = dataset.tokenizer()
    prompt = [tokenizer.bos, *map(int, tokenizer.encode_batch([config.prompt])[0])]
    tokens, seconds = _continue(model, prompt, replace(config.generation, stop_ids=(tokenizer.bos,)))
    record = {
        **provenance("sample", command),
        "model": about,
        "prompt": config.prompt,
        "text": tokenizer.decode(tokens),
        "tokens": len(tokens),
        "seconds": seconds,
        "tokens_per_second": max(len(tokens) - 1, 0) / max(seconds, 1e-9),
    }
    write_json_atomic(path, record)
    return record


def _continue(model: LanguageModel, prompt: list[int], config: GenerationConfig) -> tuple[list[int], float]:
    """The tokens that follow, and the seconds from the first to the last of them: reading the prompt is no part."""
    tokens: list[int] = []
    moments: list[float] = []
    with torch.no_grad():
        for step in stream(model, [prompt], config):
            tokens += step.tokens
            moments.append(time.perf_counter())
    return tokens, moments[-1] - moments[0] if moments else 0.0
