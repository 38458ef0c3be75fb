"""Novels, reviews, papers and code: real text through a preparation, as far as it is here."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from mesanet.config.data import PrepareConfig
from mesanet.data import open_dataset, prepare

pytest.importorskip("tiktoken")

CORPORA = ("novels", "imdb_reviews", "arxiv_peerread", "python_stdlib_code")
MEGABYTES = 1
"""How much of each is read."""


def beginning(folder: Path) -> list[str]:
    """The first documents of a corpus; a novel of several megabytes counts by itself."""
    texts: list[str] = []
    for path in sorted(folder.glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                if sum(map(len, texts)) >= MEGABYTES * 10**6:
                    return texts
                texts.append(json.loads(line)["text"])
    return texts


def test_real_text_is_prepared_and_read_back(shared_data: Path, tmp_path: Path) -> None:
    absent = [name for name in CORPORA if not (shared_data / name).is_dir()]
    if absent:
        pytest.skip(f"{shared_data} lacks {', '.join(absent)}")
    texts = {name: beginning(shared_data / name) for name in CORPORA}
    for name, documents in texts.items():
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt", encoding="utf-8", compresslevel=1) as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in documents)
    sources = tuple(str(tmp_path / f"{name}.jsonl.gz") for name in CORPORA)
    config = PrepareConfig(sources=sources, out=tmp_path / "out", tokenizer="gpt2", validation_fraction=0.1, workers=2)
    counts = prepare(config, quiet=True)["counts"]
    dataset = open_dataset(tmp_path / "out")
    assert counts["documents"] + counts["duplicates"] + counts["empty"] == sum(map(len, texts.values()))
    tokenizer = dataset.tokenizer()
    kept = [
        tokenizer.decode(split[number]) for split in (dataset.train, dataset.validation) for number in range(len(split))
    ]
    assert len(kept) == len(set(kept)) == counts["documents"]
    # GPT-2's tokens are bytes of UTF-8, so that every text comes back to the last character.
    assert set(kept) == {text for documents in texts.values() for text in documents if text.strip()}
    assert 2 < counts["bytes"] / (dataset.train.tokens + dataset.validation.tokens) < 6
