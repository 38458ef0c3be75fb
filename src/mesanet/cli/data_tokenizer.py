"""`mesanet data tokenizer SOURCE... --out FILE`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from tyro.conf import Positional, arg

from mesanet.cli.data import unescaped
from mesanet.cli.dispatch import parse
from mesanet.config.data import TokenizerConfig


@dataclass(frozen=True, kw_only=True)
class Options(TokenizerConfig):
    """Train a byte-level BPE tokenizer on a corpus."""

    sources: Positional[Annotated[tuple[str, ...], arg(metavar="SOURCE...")]]
    """What to train on, as for `mesanet data prepare`."""


def run(arguments: list[str]) -> None:
    """Train the tokenizer and say what came of it."""
    config = parse(Options, arguments, program="mesanet data tokenizer")
    config = replace(config, separator=unescaped(config.separator))
    from mesanet.data.tokenizer_training import train_tokenizer

    tokenizer = train_tokenizer(config)
    print(f"{config.out}: {tokenizer.vocabulary} tokens, BOS is {tokenizer.bos}")
