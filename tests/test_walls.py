"""The walls between the packages, kept by import-linter with the contracts in pyproject.toml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the package in this folder, whatever package is installed."""
    code = (
        "import sys; sys.path.insert(0, 'src'); from importlinter.cli import lint_imports; "
        "sys.exit(lint_imports(no_cache=True))"
    )
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)


def test_every_contract_is_kept(repository: Path) -> None:
    result = lint_imports(repository)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("ops/trespasser.py", "from mesanet.config import to_dict", "The mathematics"),
        ("ops/trespasser.py", "def f():\n    import mesanet.bench.timing", "The mathematics"),
        (
            "ops/trespasser.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import mesanet.config",
            "The math",
        ),
        ("bench/trespasser.py", "import triton.language", "Only mesanet.ops.kernels imports triton"),
        ("config/trespasser.py", "import mesanet.bench", "Data flows one way"),
        ("ops/trespasser.py", "import mesanet.io", "Data flows one way"),
        ("trespasser.py", "x = 1", "Data flows one way"),
    ],
)
def test_a_breach_is_found(repository: Path, tmp_path: Path, module: str, line: str, contract: str) -> None:
    """A wall that nothing can break would be no wall."""
    copy = copy_of_package(repository, tmp_path)
    (copy / "src" / "mesanet" / module).write_text(line + "\n")
    result = lint_imports(copy)
    assert result.returncode == 1, result.stdout + result.stderr
    broken = [row for row in result.stdout.splitlines() if row.startswith(contract)]
    assert broken, result.stdout


def test_kernels_may_import_triton(repository: Path, tmp_path: Path) -> None:
    copy = copy_of_package(repository, tmp_path)
    kernels = copy / "src" / "mesanet" / "ops" / "kernels"
    kernels.mkdir(exist_ok=True)
    (kernels / "__init__.py").touch()
    (kernels / "example.py").write_text("import triton\nimport triton.language as tl\n")
    result = lint_imports(copy)
    assert result.returncode == 0, result.stdout + result.stderr


def copy_of_package(repository: Path, folder: Path) -> Path:
    for source in (repository / "src" / "mesanet").rglob("*.py"):
        target = folder / source.relative_to(repository)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    (folder / "pyproject.toml").write_bytes((repository / "pyproject.toml").read_bytes())
    return folder
