"""The table of docs/maths.md can be made, and says what the code does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples import solver_residuals


def test_the_record_holds_every_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few of them, short: residuals of tokens that stopped early are within the tolerance up to rounding."""
    cases = {
        "stiff": lambda: solver_residuals.stiff(150, 16),
        "equal, decoding": lambda: solver_residuals.replace(solver_residuals.equal(40, 8), one_by_one=True),
    }
    monkeypatch.setattr(solver_residuals, "CASES", cases)
    solver_residuals.run(["--out", str(tmp_path), "--tolerance", "1e-3"])
    rows = json.loads((tmp_path / "solver_residuals.json").read_text())["cases"]
    assert rows.keys() == cases.keys()
    for row in rows.values():
        assert row["stopped_early"] == 1
        assert 0 < row["residual"] < 2e-3
        assert row["condition"] > 1


def test_the_table_in_the_docs_is_the_record(repository: Path) -> None:
    record = json.loads((repository / "results" / "solver_residuals.json").read_text())
    page = (repository / "docs" / "maths.md").read_text()
    for name, row in record["cases"].items():
        assert f"| {name} | {row['stopped_early']:.0%} | {row['condition']:.1e} | {row['residual']:.1e} |" in page
