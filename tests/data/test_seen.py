"""The set of hashes is a set, whatever lies in memory and whatever in files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mesanet.data.seen import SeenHashes


@pytest.mark.parametrize(("recent", "in_memory"), [(64, 500), (64, 1), (7, 10**6), (10**6, 10**6)])
def test_it_is_a_set(tmp_path: Path, recent: int, in_memory: int) -> None:
    generator = np.random.default_rng(0)
    seen, reference = SeenHashes(tmp_path / "seen", recent, in_memory), set()
    for _ in range(200):
        hashes = generator.integers(0, 20_000, size=generator.integers(0, 100)).astype(np.uint64)
        expected = []
        for value in hashes.tolist():
            expected.append(value not in reference)
            reference.add(value)
        assert seen.add(hashes).tolist() == expected
    seen.close()
    assert not (tmp_path / "seen").exists()


def test_extreme_hashes(tmp_path: Path) -> None:
    seen = SeenHashes(tmp_path / "seen", 2, 1)
    ends = np.array([0, 2**64 - 1, 1, 2**64 - 2], dtype=np.uint64)
    assert seen.add(ends).all()
    assert not seen.add(ends[::-1]).any()


def test_large_runs_lie_in_few_files(tmp_path: Path) -> None:
    """Runs at least double from one to the one before, so that a lookup visits a logarithm of them."""
    seen = SeenHashes(tmp_path / "seen", 16, 64)
    generator = np.random.default_rng(1)
    for _ in range(300):
        seen.add(generator.integers(0, 2**63, size=16).astype(np.uint64))
    assert len(list((tmp_path / "seen").iterdir())) <= 9
