"""What to evaluate on: a split of prepared data, or text that the model's own tokenizer reads now."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mesanet.config.evaluation import EvaluationConfig
from mesanet.data.dataset import Split
from mesanet.errors import UserError


class Documents(Protocol):
    """Documents by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, document: int) -> NDArray[Any]: ...


class EvaluationData(NamedTuple):
    """Documents, and what tells them from others."""

    documents: Documents
    """Tokens of each document, without BOS."""
    bos: int
    """The token before each document."""
    vocabulary: int
    """Number of token ids."""
    name: str
    """How tables call it."""
    fingerprint: str
    """Equal fingerprints mean equal tokens."""


class ModelTokenizer(NamedTuple):
    """The tokenizer that a model was trained with."""

    name: Callable[[], str]
    """What `load_tokenizer` takes; a ValueError where it can't be told."""
    told: bool
    """Whether it can be told."""


def open_data(config: EvaluationConfig, tokenizer: ModelTokenizer) -> EvaluationData:
    """Open what a config names: a prepared folder of the model's own tokenizer, or text, which that one reads."""
    from mesanet.data.layout import INDEX, PLAN

    path = config.data
    if (path / INDEX).is_file() or (path / PLAN).is_file():
        return _prepared(config, tokenizer)
    return _text(config, tokenizer)


def _prepared(config: EvaluationConfig, tokenizer: ModelTokenizer) -> EvaluationData:
    from mesanet.data.dataset import open_dataset

    dataset = open_dataset(config.data)
    split = dataset.split(config.split)
    if len(split) == 0:
        raise UserError(f"the {config.split} split of {config.data} is empty; choose another with --split")
    if tokenizer.told:
        _check_tokenizer(config.data, dataset.index["tokenizer"], tokenizer.name())
    name = f"{config.data.resolve().name}-{config.split}"
    return EvaluationData(split, dataset.bos, dataset.vocabulary, name, f"{dataset.fingerprint}/{config.split}")


def _check_tokenizer(data: Path, entry: dict[str, Any], own: str) -> None:
    """Refuse token ids that mean something else to the model."""
    from mesanet.data.tokenizer import load_tokenizer

    try:
        fingerprint = load_tokenizer(own, entry["bos_token"]).fingerprint
    except UserError:
        # A tokenizer that has no such BOS is another one.
        if entry["bos_token"] is None:
            raise
        fingerprint = None
    if fingerprint != entry["fingerprint"]:
        raise UserError(
            f"{data} was prepared with the tokenizer {entry['name']}, which is not that of the model ({own}): "
            "evaluate on data of the model's own tokenizer, or on text"
        )


def _text(config: EvaluationConfig, own: ModelTokenizer) -> EvaluationData:
    from mesanet.config.data import PrepareConfig
    from mesanet.data.documents import Reading, read_documents
    from mesanet.data.sources import find_sources
    from mesanet.data.tokenizer import load_tokenizer, repair_surrogates

    path, tokenizer = config.data, load_tokenizer(own.name())
    reading = Reading(text_column=config.text_column, separator=config.separator)
    sources = PrepareConfig(
        sources=(str(path),), out=Path("unused"), text_column=config.text_column, separator=config.separator
    )
    documents: list[NDArray[Any]] = []
    for source in find_sources(sources):
        for block in source.blocks(None):
            texts = [repair_surrogates(text) for text in read_documents(block, reading)]
            documents += [tokens for tokens in tokenizer.encode_batch(texts) if len(tokens)]
    if not documents:
        raise UserError(f"{path} holds no text")
    digest = hashlib.sha256(tokenizer.fingerprint.encode())
    for tokens in documents:
        digest.update(len(tokens).to_bytes(8, "little") + tokens.astype("<u4").tobytes())
    return EvaluationData(documents, tokenizer.bos, tokenizer.vocabulary, path.resolve().stem, digest.hexdigest())


def lengths(documents: Documents) -> NDArray[np.int64]:
    """Tokens of each document."""
    if isinstance(documents, Split):
        start, end = documents.bounds(np.arange(len(documents)))
        sizes: NDArray[np.int64] = end - start
        return sizes
    return np.array([len(documents[number]) for number in range(len(documents))], dtype=np.int64)
