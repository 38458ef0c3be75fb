"""A sample of generated text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mesanet.config.compare import CompareConfig
from mesanet.data.dataset import Dataset
from mesanet.evaluation.run import describe_model, provenance
from mesanet.io import read_record, write_json_atomic
from mesanet.model.files import find_model, load_model
from mesanet.model.text import stream_text
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
    started = time.perf_counter()
    with torch.no_grad():
        text = "".join(stream_text(model, tokenizer, config.prompt, config.generation))
    seconds = time.perf_counter() - started
    tokens = len(tokenizer.encode_batch([text])[0])
    record = {
        **provenance("sample", command),
        "model": about,
        "prompt": config.prompt,
        "text": text,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / max(seconds, 1e-9),
    }
    write_json_atomic(path, record)
    return record
