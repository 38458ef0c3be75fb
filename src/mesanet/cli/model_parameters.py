"""`mesanet model parameters`: exact parameter counts, every mixer beside attention."""

from __future__ import annotations

from dataclasses import dataclass

from mesanet.cli.dispatch import parse


@dataclass(frozen=True, kw_only=True)
class Options:
    """Print how many parameters every mixer has in every preset, and by how much that differs from attention."""

    presets: tuple[str, ...] = ("small", "medium", "large")
    """Which presets."""
    mixers: tuple[str, ...] = ()
    """Which mixers or patterns such as hawk-mesa; all mixers and hawk-mesa if none is named."""


def run(arguments: list[str]) -> None:
    """Count and print."""
    options = parse(Options, arguments, program="mesanet model parameters")
    from mesanet.mixers import MIXERS
    from mesanet.model.parameters import compare_parameters, parameter_table

    mixers = options.mixers or (*MIXERS, "hawk-mesa")
    print(parameter_table(compare_parameters(options.presets, mixers)))
