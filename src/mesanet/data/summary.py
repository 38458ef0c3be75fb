"""What a prepared folder holds, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mesanet.data.dataset import Dataset
from mesanet.data.layout import SPLITS
from mesanet.data.sources import TEXT

BEGINNING = 100


def describe(index: dict[str, Any]) -> str:
    """Return one line about an index."""
    counts = index["counts"]
    splits = (
        f"{split} {index['splits'][split]['tokens']:,} tokens in {index['splits'][split]['documents']:,} documents"
        for split in SPLITS
    )
    dropped = f"dropped {counts['duplicates']:,} duplicates and {counts['empty']:,} empty documents"
    return f"{', '.join(splits)}; {dropped}"


def warnings(index: dict[str, Any]) -> list[str]:
    """Return what the user had better know about a finished preparation."""
    return [*_empty_split(index), *_unseen_separator(index)]


def _unseen_separator(index: dict[str, Any]) -> list[str]:
    """Whether there are no more documents than the text files would give without their separator."""
    options, counts = index["options"], index["counts"]
    sizes = [source["size"] for source in index["sources"] if source.get("file", "").endswith(TEXT)]
    if options["separator"] is None or len(sizes) < len(index["sources"]):
        return []
    if counts["documents"] + counts["duplicates"] + counts["empty"] > sum(
        max(-(-size // options["document_bytes"]), 1) for size in sizes
    ):
        return []
    return [f"the text between documents, --separator {options['separator']!r}, is nowhere in the sources"]


def _empty_split(index: dict[str, Any]) -> list[str]:
    fraction = index["options"]["validation_fraction"]
    empty = [split for split in SPLITS if not index["splits"][split]["documents"]]
    if empty and 0 < fraction < 1:
        return [
            f"the {empty[0]} split is empty: there are {index['counts']['documents']} documents, of which "
            f"--validation-fraction {fraction:g} are held out; prepare again into another --out, with another "
            "fraction, or the text cut into more documents with --document-bytes 65536 or --separator"
        ]
    return []


def shown_documents(dataset: Dataset, count: int) -> Iterator[str]:
    """Give a line with the beginning of each of the first documents of both splits."""
    if count <= 0:
        return
    tokenizer = dataset.tokenizer()
    for split in (dataset.train, dataset.validation):
        for number in range(min(count, len(split))):
            tokens = split[number]
            text = tokenizer.decode(tokens[:BEGINNING])
            yield f"{split.name} document {number}, {len(tokens):,} tokens: {text[:BEGINNING]!r}"
