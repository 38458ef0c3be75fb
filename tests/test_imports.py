"""What is imported when: the package and its --help stay light."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import mesanet

HEAVY = {"transformers", "datasets", "matplotlib", "tokenizers", "tiktoken", "triton", "lm_eval", "pyarrow"}


def modules_after(code: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has loaded after `code`."""
    program = f"{code}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}}, file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(result.stderr.split())


@pytest.mark.parametrize(
    ("code", "forbidden"),
    [
        ("import mesanet", HEAVY | {"torch", "numpy"}),
        ("from mesanet import *", HEAVY),
        (
            "from mesanet.cli import main\ntry: main(['--help'])\nexcept SystemExit as end: assert end.code == 0",
            HEAVY | {"torch", "numpy", "tyro", "rich"},
        ),
    ],
    ids=["package", "every public name", "help"],
)
def test_heavy_packages_wait_until_they_are_used(code: str, forbidden: set[str]) -> None:
    assert not modules_after(code) & forbidden


def test_every_public_name_is_there() -> None:
    for name in mesanet.__all__:
        assert getattr(mesanet, name) is not None
    assert set(mesanet.__all__) <= set(dir(mesanet))


def test_type_checkers_see_the_same_names_as_users() -> None:
    tree = ast.parse(Path(mesanet.__file__).read_text())
    declared: dict[str, str | None] = {}
    for block in (node for node in tree.body if isinstance(node, ast.If)):
        for statement in block.body:
            assert isinstance(statement, ast.ImportFrom)
            declared |= {alias.asname or alias.name: statement.module for alias in statement.names}
    assert declared == mesanet._HOME | dict.fromkeys(mesanet._SUBMODULES, "mesanet")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        mesanet.nonsense  # noqa: B018
    with pytest.raises(ImportError):
        importlib.import_module("mesanet.nonsense")
