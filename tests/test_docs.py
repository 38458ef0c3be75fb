"""The names in the documentation of the mathematics are names of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path


def names(path: Path) -> set[str]:
    """Functions and classes of a file, and methods as Class.method."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            parts = node.body if isinstance(node, ast.ClassDef) else []
            found |= {node.name, *(f"{node.name}.{part.name}" for part in parts if isinstance(part, ast.FunctionDef))}
    return found


def test_every_function_and_test_that_the_maths_names_exists(repository: Path) -> None:
    spans = re.findall(r"`([^`\n]+)`", (repository / "docs" / "maths.md").read_text())
    tests = {path: names(path) for path in (repository / "tests").rglob("*.py")}
    for span in spans:
        path, _, name = re.sub(r"::?\s*", ":", span).partition(":")
        if path.endswith(".py"):
            places = [
                *repository.glob(path),
                *repository.glob(f"src/mesanet/{path}"),
                *(repository / "tests").rglob(path),
            ]
            assert places, f"docs/maths.md: there is no file {path}"
            assert not name or any(name in names(place) for place in places), f"docs/maths.md: {path} has no {name}"
        elif re.fullmatch(r"test_\w+", span):
            assert any(span in found for found in tests.values()), f"docs/maths.md: there is no test {span}"
        elif re.fullmatch(r"\w+_(objective|update)|omega_momentum|newton_schulz", span):
            assert span in names(repository / "src/mesanet/ops/objectives.py"), f"docs/maths.md: there is no {span}"
