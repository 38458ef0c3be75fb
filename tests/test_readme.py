"""What the README shows works."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def blocks(repository: Path, language: str) -> list[str]:
    text = (repository / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def test_the_example_runs_and_is_short(repository: Path, tmp_path: Path) -> None:
    (example,) = blocks(repository, "python")
    assert len([line for line in example.splitlines() if line.strip()]) <= 8
    result = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("torch.Size([2, 1, 4, 32]) after ")


def test_the_decoding_step_gives_what_one_call_gives(repository: Path) -> None:
    """The sentence under the example: both solve to a relative residual of 1e-4."""
    import mesanet

    (example,) = blocks(repository, "python")
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    sequences = [names[name] for name in ("q", "k", "v", "log_decay", "write", "ridge")]
    whole = mesanet.mesa(*sequences).output[:, -1:]  # type: ignore[arg-type]
    step = names["last"].output  # type: ignore[attr-defined]
    # The error of x is at most the condition number (about 1 + 100 / 64 / ridge, below 10) times the residuals' 2e-4.
    assert (whole - step).norm() <= 10 * 2e-4 * whole.norm()


def test_every_make_target_of_the_readme_exists(repository: Path) -> None:
    named = {
        name for block in blocks(repository, "bash") for name in re.findall(r"^make ([a-z-]+)", block, re.MULTILINE)
    }
    targets = set(re.findall(r"^([a-z-]+):", (repository / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert named
    assert named <= targets
