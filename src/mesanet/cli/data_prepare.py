"""`mesanet data prepare SOURCE... --out DIR`."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Annotated

from tyro.conf import Positional, arg

from mesanet.cli.data import unescaped
from mesanet.cli.dispatch import parse
from mesanet.config.data import PrepareConfig


@dataclass(frozen=True, kw_only=True)
class Options(PrepareConfig):
    """Turn text into token shards that training reads; the same command again goes on where it was stopped."""

    sources: Positional[Annotated[tuple[str, ...], arg(metavar="SOURCE...")]]
    """Files and folders of .txt, .jsonl (both also .gz and .zst) and .parquet; `python-stdlib`; or a data set of the
    hub, such as cerebras/SlimPajama-627B (`hub:` before the name says so where a folder has the same name)."""


def run(arguments: list[str]) -> None:
    """Prepare the data and say what came of it."""
    config = parse(Options, arguments, program="mesanet data prepare")
    config = replace(config, separator=unescaped(config.separator))
    from mesanet.data.preparation import prepare
    from mesanet.data.summary import describe, warnings

    index = prepare(config)
    print(f"{config.out}: {describe(index)}")
    for warning in warnings(index):
        print(f"mesanet: {warning}", file=sys.stderr)
