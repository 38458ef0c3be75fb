"""What every test starts from: one thread, a fixed seed, property tests without a clock, and the way to the data."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, register_random, settings

REPOSITORY = Path(__file__).resolve().parent.parent

# Timings say nothing about correctness on a shared machine; derandomized, so that a failure is the change's own.
settings.register_profile(
    "default", deadline=None, derandomize=True, max_examples=25, suppress_health_check=[HealthCheck.too_slow]
)
# HYPOTHESIS_PROFILE=search looks for new examples, and longer.
settings.register_profile(
    "search", deadline=None, derandomize=False, max_examples=500, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


class _TorchRandom:
    """Torch's global generator, so that every Hypothesis example starts from the same seed and can be replayed."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


_TORCH_RANDOM = _TorchRandom()
register_random(_TORCH_RANDOM)

# Small problems run slower on several threads than on one.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The folder that holds pyproject.toml."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of corpora and evaluation sets; tests that ask for it are skipped where it is absent."""
    folder = Path(os.environ.get("MESANET_SHARED_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no data at {folder}; set MESANET_SHARED_DATA to the folder that holds it")
    return folder
