"""`mesanet data speed SOURCE...`."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from mesanet.cli.data import unescaped
from mesanet.cli.dispatch import parse
from mesanet.config.base import check_in_range
from mesanet.config.data import PrepareConfig


@dataclass(frozen=True, kw_only=True)
class Options(PrepareConfig):
    """Measure how fast sources become token shards, beside the tokenizer alone on the same text."""

    sources: Positional[Annotated[tuple[str, ...], arg(metavar="SOURCE...")]]
    """What to prepare, as for `mesanet data prepare`."""
    out: Path = Path("runs/data-speed.json")
    """File for the record; the shards are removed again."""
    repeats: int = 3
    """How often to measure; the fastest counts."""


def run(arguments: list[str]) -> None:
    """Measure, and say what came of it."""
    options = parse(Options, arguments, program="mesanet data speed")
    check_in_range("repeats", options.repeats, 1)
    from mesanet.data.speed import describe_speed, measure_preparation
    from mesanet.io import write_json_atomic

    config = PrepareConfig(**{field.name: getattr(options, field.name) for field in fields(PrepareConfig)})
    config = replace(config, separator=unescaped(config.separator))
    record = measure_preparation(config, options.repeats, ["mesanet", "data", "speed", *arguments])
    write_json_atomic(options.out, record)
    print(f"{options.out}: {describe_speed(record)}")
