"""What an installation takes: pinned versions, and nothing that only exists on one machine."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

PACKAGING = ("pyproject.toml", "constraints.txt", "Makefile", ".ci/run")
# The builds of torch for a GPU need one release of it, another than the tests do on a CPU.
UNPINNED = {"triton"}


@pytest.fixture(scope="module")
def project(repository: Path) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def pinned(repository: Path) -> dict[str, str]:
    lines = (repository / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def package(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0]  # type: ignore[index]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_direct_dependency_is_pinned(repository: Path, project: dict[str, Any]) -> None:
    extras = {name: items for name, items in project["optional-dependencies"].items() if name != "all"}
    wanted = {normal(package(item)) for items in [project["dependencies"], *extras.values()] for item in items}
    assert wanted - {normal(name) for name in pinned(repository)} == UNPINNED


def test_pins_are_whole_versions_without_a_build(repository: Path) -> None:
    """A local part such as +cpu would not be found where packages come from elsewhere."""
    assert all(re.fullmatch(r"\d[\w.]*", version) for version in pinned(repository).values())


def test_all_means_every_extra_but_the_developers(project: dict[str, Any]) -> None:
    extras = project["optional-dependencies"]
    assert extras["all"] == [f"mesanet[{','.join(name for name in extras if name not in ('dev', 'all'))}]"]


@pytest.mark.parametrize("name", PACKAGING)
def test_no_host_and_no_local_path(repository: Path, name: str) -> None:
    text = (repository / name).read_text(encoding="utf-8")
    assert not re.search(
        r"https?://|file:|--(extra-)?index-url|--find-links|(?<![\w.*])/(home|root|opt|tmp|work)/", text
    )


def test_the_script_of_ci_can_be_run(repository: Path) -> None:
    assert (repository / ".ci" / "run").stat().st_mode & 0o111
