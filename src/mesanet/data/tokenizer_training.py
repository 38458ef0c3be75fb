"""Training a byte-level BPE on the same sources that a preparation reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mesanet.config.data import PrepareConfig, TokenizerConfig
from mesanet.data.documents import Reading, read_documents
from mesanet.data.progress import Progress
from mesanet.data.sources import find_sources
from mesanet.data.tokenizer import END_OF_TEXT, JsonTokenizer, Tokenizer, repair_surrogates
from mesanet.errors import UserError
from mesanet.io import write_text_atomic
from mesanet.optional import import_optional

MILLION = 10**6
TRAINED = "bpe:"
READING = ("sources", "text_column", "separator", "document_bytes", "hub_config", "hub_split", "hub_revision")
"""What a preparation and the training of a tokenizer say in the same way: which text it is."""


def train_tokenizer(config: TokenizerConfig, *, quiet: bool = False) -> Tokenizer:
    """Train the tokenizer, write its tokenizer.json whole or not at all, and return it.

    It splits words as GPT-2's does, knows every byte, and has <|endoftext|> as BOS.
    """
    if config.out.exists():
        raise UserError(f"{config.out} exists already; choose another name with --out, or remove it")
    if not config.out.name.endswith(".json"):
        raise UserError(f"--out names the file to write, such as {config.out / 'tokenizer.json'}, got {config.out}")
    tokenizer = _train(config, quiet=quiet)
    write_text_atomic(config.out, tokenizer.to_str(pretty=True))
    return JsonTokenizer(str(config.out), tokenizer)


def tokenizer_of_sources(config: PrepareConfig, *, quiet: bool = False) -> Tokenizer:
    """Train the tokenizer that `bpe:N` stands for, on the sources of a preparation; equal sources give equal ones."""
    if config.bos_token is not None:
        raise UserError(f"the tokenizer {config.tokenizer} has its own BOS; leave --bos-token out")
    given = {name: getattr(config, name) for name in READING}
    settings = TokenizerConfig(**given, out=Path("unused"), vocabulary=trained_vocabulary(config.tokenizer))
    return JsonTokenizer(config.tokenizer, _train(settings, quiet=quiet))


def trained_vocabulary(name: str) -> int:
    """The N of `bpe:N`."""
    number = name.removeprefix(TRAINED)
    if not number.isdecimal():
        raise UserError(f"tokenizer: got {name!r}, expected a vocabulary after {TRAINED}, such as {TRAINED}8192")
    return int(number)


def _train(config: TokenizerConfig, *, quiet: bool) -> Any:
    library = import_optional("tokenizers", "data")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=config.vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        # The library's own bars leave blank lines on standard output, where results go.
        show_progress=False,
    )
    with Progress("tokenizer", "B", quiet=quiet) as progress:
        tokenizer.train_from_iterator(_texts(config, progress), trainer=trainer)
    found = tokenizer.get_vocab_size()
    if found < config.vocabulary:
        raise UserError(
            f"vocabulary {config.vocabulary} is more than this text gives: there are {found} tokens at most; "
            "take a smaller vocabulary or more text"
        )
    return tokenizer


def _texts(config: TokenizerConfig, progress: Progress) -> Iterator[str]:
    """Give documents until there are as many bytes as asked for."""
    most = config.megabytes * MILLION
    given = {name: getattr(config, name) for name in READING}
    reading = Reading(text_column=config.text_column, separator=config.separator)
    done = 0
    for source in find_sources(PrepareConfig(**given, out=Path("unused"))):
        for block in source.blocks(None):
            yield from map(repair_surrogates, read_documents(block, reading))
            done += len(block.payload)
            progress.update(done, None, note=f"{done / MILLION:.0f} MB of text")
            if done >= most:
                return
