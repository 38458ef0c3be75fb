"""A book of 60,000 tokens takes no more memory than one of 4,000."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# One process for each length, because a process's peak never falls again.
PROGRAM = """
import resource, sys
from pathlib import Path
import numpy as np, torch
from mesanet.config.evaluation import EvaluationConfig
from mesanet.config.model import ModelConfig
from mesanet.evaluation import evaluate
from mesanet.evaluation.documents import EvaluationData
from mesanet.model.backbone import LanguageModel

torch.set_num_threads(1)
mixers, length = tuple(sys.argv[1].split("-")), int(sys.argv[2])
config = ModelConfig(mixers=mixers, width=64, layers=2, heads=2, key_size=32, vocabulary=8000, window=128)
book = np.random.default_rng(0).integers(0, 7999, length).astype(np.uint16)
data = EvaluationData([book], 7999, 8000, "book", "book")
record = evaluate(LanguageModel(config).eval(), data, EvaluationConfig(data=Path("book"), length=length))
assert record["summary"]["tokens"] == length
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def peak(mixers: str, length: int) -> float:
    """MiB."""
    words = [sys.executable, "-c", PROGRAM, mixers, str(length)]
    # glibc gives large blocks back to the system at once only below this threshold, which it raises as it goes; what
    # it keeps for later would be measured otherwise, not what is needed.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    return float(subprocess.run(words, check=True, capture_output=True, text=True, env=environment).stdout)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mixers", ["mesa", "hawk-gated_deltanet", "sliding_window-gla", "attention"])
def test_peak_memory_does_not_grow_with_the_length(mixers: str) -> None:
    short, long = peak(mixers, 4096), peak(mixers, 60_000)
    # The book and its losses are at most 60,000 * 6 numbers of 8 bytes: 3 MiB. What attention has to remember is
    # 60,000 * 2 layers * 2 heads * (32 + 32) float32: 59 MiB, and three times that while its room doubles; its mask
    # takes 64 MiB in float32 and 16 MiB as it is made. All the logits would be 1,831 MiB.
    allowance = 8 + (3 * 59 + 64 + 16 if mixers == "attention" else 0)
    assert long - short < allowance, (short, long)
