"""What to prepare, and what to read from it in training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mesanet.config.base import ConfigError, check_fields, check_in_range, check_not_empty


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Turn text into token shards that training reads."""

    sources: tuple[str, ...]
    """Files and folders of .txt, .jsonl (both also .gz and .zst) and .parquet; `python-stdlib`; or a data set of the
    hub, such as cerebras/SlimPajama-627B (`hub:` before the name says so where a folder has the same name)."""
    out: Path
    """Folder for the shards."""
    tokenizer: str = "gpt2"
    """`gpt2`, `bytes`, `bpe:N` to train one of N tokens on the sources, the path of a tokenizer.json, or a name on the
    hub."""
    bos_token: str | None = None
    """The token to put between documents, for a tokenizer.json that has none of the usual names for it."""
    text_column: str = "text"
    """Field of a JSON record, or column of a table, that holds the text."""
    separator: str | None = None
    """Text between the documents of a .txt file, such as <|endoftext|> or \\n\\n; without it a file is one document."""
    document_bytes: int = 1 << 22
    """A longer .txt file is cut into documents of at most this size, at the ends of lines."""
    shard_tokens: int = 1 << 26
    """Tokens of a shard. A shard ends with the document that reaches this number."""
    validation_fraction: float = 0.01
    """Share of the documents, chosen by their hashes, that are held out for validation."""
    max_tokens: int | None = None
    """Stop after the document that reaches this many tokens, over both splits; None for all there is."""
    workers: int | None = None
    """Processes that tokenise; by default one for each core, up to 16."""
    seed: int = 0
    """Which documents are held out."""
    hub_config: str | None = None
    """Configuration of the data set of the hub, where it has several."""
    hub_split: str = "train"
    """Split of the data set of the hub."""
    hub_revision: str | None = None
    """Commit or branch of the data set of the hub; the commit that it stands for is what is read and put on record."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_not_empty("sources", self.sources)
        check_in_range("document_bytes", self.document_bytes, 1 << 10, 6 << 20)
        check_in_range("shard_tokens", self.shard_tokens, 1)
        check_in_range("validation_fraction", self.validation_fraction, 0, 1)
        if self.max_tokens is not None:
            check_in_range("max_tokens", self.max_tokens, 1)
        if self.separator is not None:
            check_not_empty("separator", self.separator)
        if self.workers is not None:
            check_in_range("workers", self.workers, 0, 256)


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Train a byte-level BPE tokenizer on a corpus."""

    sources: tuple[str, ...]
    """What to train on, as for `mesanet data prepare`."""
    out: Path
    """The tokenizer.json to write."""
    vocabulary: int = 8192
    """Number of token ids: the 256 bytes, BOS, and merges."""
    text_column: str = "text"
    """Field of a JSON record, or column of a table, that holds the text."""
    separator: str | None = None
    """Text between the documents of a .txt file, such as <|endoftext|> or \\n\\n; without it a file is one document."""
    document_bytes: int = 1 << 22
    """A longer .txt file is cut into documents of at most this size, at the ends of lines."""
    hub_config: str | None = None
    """Configuration of the data set of the hub, where it has several."""
    hub_split: str = "train"
    """Split of the data set of the hub."""
    hub_revision: str | None = None
    """Commit or branch of the data set of the hub; the commit that it stands for is what is read and put on record."""
    megabytes: float = 200.0
    """How much text to read at most, taken from the start of the sources: training holds its word counts in memory."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_not_empty("sources", self.sources)
        check_in_range("vocabulary", self.vocabulary, 257, 1 << 20)
        check_in_range("document_bytes", self.document_bytes, 1 << 10, 6 << 20)
        if self.separator is not None:
            check_not_empty("separator", self.separator)
        check_in_range("megabytes", self.megabytes, 0, low_open=True)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which batches training sees."""

    path: Path
    """Folder that `mesanet data prepare` wrote."""
    sequence_length: int = 2048
    """Tokens of a sequence."""
    batch_size: int = 256
    """Sequences of a step, over all processes together."""
    seed: int = 0
    """The order of documents and of sequences."""
    prefetch: int = 2
    """Batches that are ready before they are asked for; 0 makes each one when it is asked for."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_in_range("sequence_length", self.sequence_length, 1)
        check_in_range("batch_size", self.batch_size, 1)
        check_in_range("seed", self.seed, 0, 2**63 - 1)
        check_in_range("prefetch", self.prefetch, 0)
        if self.path == Path():
            raise ConfigError("path", "must name a folder that `mesanet data prepare` wrote, got an empty path")
