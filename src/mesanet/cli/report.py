"""`mesanet report DIR`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from mesanet.cli.dispatch import parse


@dataclass(frozen=True, kw_only=True)
class Options:
    """Draw the report of a comparison again, from its records alone; also while it is still going on."""

    folder: Positional[Path]
    """Folder of `mesanet compare`."""


def run(arguments: list[str]) -> None:
    """Draw, and say where the page is."""
    options = parse(Options, arguments, program="mesanet report")
    from mesanet.report.page import build_report

    print(build_report(options.folder))
