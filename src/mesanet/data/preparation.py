"""Turning sources into token shards: in parallel, in a fixed order, and with nothing lost when it is killed."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mesanet.config.data import PrepareConfig
from mesanet.data.documents import Block, Documents, Reading, token_type
from mesanet.data.folder import Folder
from mesanet.data.layout import FORMAT, SEEN, TOKENIZER
from mesanet.data.pool import tokenise_all
from mesanet.data.progress import Progress
from mesanet.data.seen import SeenHashes
from mesanet.data.shards import ShardWriter
from mesanet.data.sources import Source, find_sources
from mesanet.data.tokenizer import Tokenizer, load_tokenizer
from mesanet.data.tokenizer_training import TRAINED, tokenizer_of_sources
from mesanet.errors import UserError
from mesanet.io import write_text_atomic

MOST_WORKERS = 16


def prepare(config: PrepareConfig, *, quiet: bool = False) -> dict[str, Any]:
    """Prepare what `config` asks for, or go on where an earlier call was stopped, and return the index.

    The result depends on the sources and the options alone: not on the number of workers, nor on interruptions.
    """
    try:
        with Folder(config.out) as folder:
            sources = find_sources(config)
            tokenizer = find_tokenizer(config, sources, folder, quiet=quiet)
            plan = make_plan(config, tokenizer, sources)
            index = folder.claim(plan, lambda problem: None if quiet else print(problem, file=sys.stderr, flush=True))
            return _Preparation(config, tokenizer, sources, folder, quiet).run(plan) if index is None else index
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"the disk is full at {config.out}; finished shards are kept: make room and run the same command to go on"
        ) from error


def find_tokenizer(config: PrepareConfig, sources: list[Source], folder: Folder, *, quiet: bool) -> Tokenizer:
    """Load the tokenizer, or train the one that `bpe:N` stands for, unless this very preparation has it already."""
    if not config.tokenizer.startswith(TRAINED):
        return load_tokenizer(config.tokenizer, config.bos_token)
    trained = trained_before(config, sources, folder)
    return tokenizer_of_sources(config, quiet=quiet) if trained is None else trained


def trained_before(config: PrepareConfig, sources: list[Source], folder: Folder) -> Tokenizer | None:
    """The tokenizer that an earlier call of this very preparation has trained, if it is there and whole."""
    there = folder.asked_for()
    if there is None or there["tokenizer"]["name"] != config.tokenizer:
        return None
    asked = {"options": plan_options(config), "sources": [each.identity() for each in sources]}
    if {name: there[name] for name in asked} != asked:
        return None
    try:
        tokenizer = load_tokenizer(folder.path / TOKENIZER)
    except ValueError:
        return None
    if tokenizer.fingerprint != there["tokenizer"]["fingerprint"]:
        return None
    tokenizer.name = config.tokenizer
    return tokenizer


def plan_options(config: PrepareConfig) -> dict[str, Any]:
    """The options that the result depends on."""
    names = ("text_column", "separator", "document_bytes", "shard_tokens", "validation_fraction", "max_tokens", "seed")
    return {name: getattr(config, name) for name in names}


def make_plan(config: PrepareConfig, tokenizer: Tokenizer, sources: list[Source]) -> dict[str, Any]:
    """Return everything that the result depends on, as plain JSON data."""
    return {
        "format": FORMAT,
        "tokenizer": {
            "name": tokenizer.name,
            "vocabulary": tokenizer.vocabulary,
            "bos": tokenizer.bos,
            "bos_token": config.bos_token,
            "fingerprint": tokenizer.fingerprint,
        },
        "token_type": token_type(tokenizer.vocabulary).name,
        "options": plan_options(config),
        "sources": [source.identity() for source in sources],
    }


class _Preparation:
    def __init__(
        self, config: PrepareConfig, tokenizer: Tokenizer, sources: list[Source], folder: Folder, quiet: bool
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._sources = sources
        self._folder = folder
        self._quiet = quiet
        self._writer = ShardWriter(folder.path, config.shard_tokens, config.validation_fraction, config.seed)

    def run(self, plan: dict[str, Any]) -> dict[str, Any]:
        seen = SeenHashes(self._folder.path / SEEN)
        try:
            position = self._restore(seen)
            if not self._is_full():
                self._read(position, seen)
        finally:
            self._writer.abandon()
            seen.close()
        self._check_not_empty()
        own = self._tokenizer.definition() is not None
        return self._folder.finish(plan, self._writer.counts, own_tokenizer=own)

    def _restore(self, seen: SeenHashes) -> list[Any]:
        """Take up what finished groups say, and return where reading goes on."""
        position: list[Any] = [[0, None], 0]
        for record in self._folder.records():
            for hashes in self._folder.hashes(record):
                seen.add(hashes)
            self._writer.restore(record)
            position = record["position"]
        return position

    def _read(self, position: list[Any], seen: SeenHashes) -> None:
        (number, start), skipped = position
        sizes = [source.size for source in self._sources]
        total = None if None in sizes else sum(size or 0 for size in sizes)
        before = np.cumsum([0, *(size or 0 for size in sizes)])
        writer, most = self._writer, self._config.max_tokens
        pairs = tokenise_all(
            self._blocks(number, start), self._tokenizer, *self._worker_tokenizer(), self._reading(), self._workers()
        )
        with (
            Progress("preparing", "tokens", quiet=self._quiet) as progress,
            contextlib.closing(pairs),
        ):
            for block, documents in pairs:
                passed = min(skipped, len(documents))
                documents = documents.part(passed)
                full = documents.lengths > 0
                fresh = np.zeros(len(documents), dtype=np.bool_)
                fresh[full] = seen.add(documents.hashes[full])
                count = self._wanted(documents, fresh)
                writer.add(documents.part(0, count), fresh[:count], block.position, passed)
                skipped -= passed
                note = f"{writer.counts['documents']:,} documents, {writer.tokens:,} tokens"
                read = int(before[block.position[0]]) + block.progress
                if most is None:
                    progress.update(read, total, counted=writer.tokens, note=note)
                else:
                    progress.update(min(writer.tokens, most), most, note=note)
                if self._is_full():
                    break
        writer.finish_group([[len(self._sources), None], 0])

    def _wanted(self, documents: Documents, fresh: NDArray[np.bool_]) -> int:
        """How many of a block's documents there are up to the one that reaches the most tokens."""
        if self._config.max_tokens is None:
            return len(documents)
        totals = np.cumsum(np.where(fresh, documents.lengths, 0))
        return min(int(np.searchsorted(totals, self._config.max_tokens - self._writer.tokens)) + 1, len(documents))

    def _is_full(self) -> bool:
        return self._config.max_tokens is not None and self._writer.tokens >= self._config.max_tokens

    def _blocks(self, number: int, start: Any) -> Iterator[Block]:
        """Give the blocks of all sources; a position is [source, position in it]."""
        for index, source in enumerate(self._sources[number:], start=number):
            for block in source.blocks(start):
                yield replace(block, position=[index, block.position])
            start = None

    def _worker_tokenizer(self) -> tuple[str, str | None]:
        """Return what the workers load: never anything that is fetched from elsewhere."""
        definition = self._tokenizer.definition()
        if definition is None:
            return self._config.tokenizer, None
        return str(write_text_atomic(self._folder.path / TOKENIZER, definition)), self._config.bos_token

    def _reading(self) -> Reading:
        return Reading(text_column=self._config.text_column, separator=self._config.separator)

    def _workers(self) -> int:
        if self._config.workers is not None:
            return self._config.workers
        available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(available, MOST_WORKERS)

    def _check_not_empty(self) -> None:
        if self._writer.tokens == 0:
            names = ", ".join(source.name for source in self._sources[:5])
            raise UserError(f"there is no text in {names}: every document is empty")
