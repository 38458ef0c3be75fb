"""The records that the repository holds are what the present commands write and show."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mesanet.bench import gated_report, model_report, op_report

SHOW: dict[str, Callable[[dict[str, Any]], None]] = {
    "bench_model*.json": model_report.show,
    "bench_generation*.json": model_report.show,
    "bench_training*.json": model_report.show,
    "bench_gated*.json": gated_report.show,
    "bench_op*.json": op_report.show,
}


@pytest.mark.parametrize("pattern", SHOW)
def test_every_record_can_be_shown(pattern: str, repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = sorted((repository / "results").glob(pattern))
    assert records
    for path in records:
        SHOW[pattern](json.loads(path.read_text()))
        assert "attention" in capsys.readouterr().out
