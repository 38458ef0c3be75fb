"""`mesanet data show DIR`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from mesanet.cli.dispatch import parse


@dataclass(frozen=True, kw_only=True)
class Options:
    """Say what a prepared folder holds, after checking every file against its checksum."""

    path: Positional[Path]
    """Folder that `mesanet data prepare` wrote."""
    documents: int = 1
    """Number of documents whose beginning is shown."""


def run(arguments: list[str]) -> None:
    """Check the folder and describe it."""
    options = parse(Options, arguments, program="mesanet data show")
    from mesanet.data.dataset import open_dataset
    from mesanet.data.summary import describe, shown_documents

    dataset = open_dataset(options.path, verify=True)
    print(f"{options.path}: {describe(dataset.index)}")
    print(f"tokenizer {dataset.index['tokenizer']['name']}, every checksum is right, fingerprint {dataset.fingerprint}")
    for line in shown_documents(dataset, options.documents):
        print(line)
