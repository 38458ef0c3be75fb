"""The files of a prepared folder: their names, and the records that say what has to be in them.

    index.json                  written last: tokenizer, options, sources, counts, and each file's size and SHA-256
    tokenizer.json              unless the tokenizer is `gpt2` or `bytes`
    train-00000.tokens, ...     the tokens of whole documents, end to end: little-endian uint16, or uint32 above 65536
    train.documents             two rows of little-endian uint64: where each document ends, counted over all shards
                                of the split, and the hash of its text
    validation-*, validation.*  the same for the held-out documents

While a preparation runs, `preparation.json` holds what was asked for, and each finished group of shards (one of each
split) has a record `group-00000.json`, written after its shards; whatever no record names is removed on resuming.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mesanet.io import file_digest

FORMAT = 1
SPLITS = ("train", "validation")
INDEX = "index.json"
PLAN = "preparation.json"
TOKENIZER = "tokenizer.json"
LOCK = ".lock"
SEEN = ".seen"
VERIFIED = "verified.json"

_OURS = re.compile(
    r"(train|validation)(-\d{5,})?\.(tokens|documents)(\.partial)?|group-\d{5,}\.json|\..+\.partial|"
    + "|".join(map(re.escape, (INDEX, PLAN, TOKENIZER, LOCK, SEEN, VERIFIED)))
)


def tokens_name(split: str, number: int) -> str:
    """Return the name of a token shard."""
    return f"{split}-{number:05}.tokens"


def documents_name(split: str, number: int | None = None) -> str:
    """Return the name of the table of documents: of one shard, while preparing, or of the whole split."""
    return f"{split}.documents" if number is None else f"{split}-{number:05}.documents"


def record_name(number: int) -> str:
    """Return the name of the record of one group of shards."""
    return f"group-{number:05}.json"


def is_ours(name: str) -> bool:
    """Say whether a preparation may have written a file of this name."""
    return _OURS.fullmatch(name) is not None


def file_entry(path: Path, digest: str | None = None, **more: Any) -> dict[str, Any]:
    """Describe a file for the index."""
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": digest or file_digest(path), **more}
