from __future__ import annotations

from pathlib import Path

import pytest
from tests.training.tiny import prepare_tiny


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder of a few thousand bytes."""
    return prepare_tiny(tmp_path_factory.mktemp("tiny"))
