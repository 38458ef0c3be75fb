"""How many parameters models have, counted without allocating them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from mesanet import presets
from mesanet.config.model import ModelConfig
from mesanet.model.backbone import LanguageModel


class Count(NamedTuple):
    """The parameters of one preset with one pattern of mixers."""

    preset: str
    mixers: str
    parameters: int
    to_attention: float
    """The number over that of the same preset with attention."""


def count_parameters(config: ModelConfig) -> int:
    """Number of parameters of a model with this config; the embedding counts once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in LanguageModel(config).parameters())


def compare_parameters(names: Sequence[str], mixers: Sequence[str]) -> list[Count]:
    """Every pattern of mixers in every preset, beside attention in the same preset."""
    counts = []
    for name in names:
        base = count_parameters(presets.model(name, "attention"))
        for pattern in mixers:
            parameters = count_parameters(presets.model(name, pattern))
            counts.append(Count(name, pattern, parameters, parameters / base))
    return counts


def parameter_table(counts: Sequence[Count]) -> str:
    """A Markdown table: a row for each pattern, a column for each preset."""
    names = list(dict.fromkeys(count.preset for count in counts))
    cells = {(count.mixers, count.preset): f"{count.parameters:,} ({count.to_attention - 1:+.2%})" for count in counts}
    lines = ["| mixer | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    lines += [
        f"| {pattern} | " + " | ".join(cells[pattern, name] for name in names) + " |"
        for pattern in dict.fromkeys(count.mixers for count in counts)
    ]
    return "\n".join(lines)
