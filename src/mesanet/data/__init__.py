"""From text to batches: tokenizers, preparation, prepared data, packing and loading.

The public names are imported at first use: a worker process of a preparation needs neither torch nor most of the rest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mesanet.data.dataset import Dataset as Dataset
    from mesanet.data.dataset import Split as Split
    from mesanet.data.dataset import open_dataset as open_dataset
    from mesanet.data.index import DamagedShardError as DamagedShardError
    from mesanet.data.loader import Loader as Loader
    from mesanet.data.loader import TensorBatch as TensorBatch
    from mesanet.data.loader import make_batches as make_batches
    from mesanet.data.packing import IGNORED as IGNORED
    from mesanet.data.packing import Batch as Batch
    from mesanet.data.packing import Batches as Batches
    from mesanet.data.packing import PackedSequences as PackedSequences
    from mesanet.data.packing import packed_windows as packed_windows
    from mesanet.data.preparation import prepare as prepare
    from mesanet.data.tokenizer import Tokenizer as Tokenizer
    from mesanet.data.tokenizer import load_tokenizer as load_tokenizer
    from mesanet.data.tokenizer_training import train_tokenizer as train_tokenizer

_NAMES = {
    "dataset": ("Dataset", "Split", "open_dataset"),
    "index": ("DamagedShardError",),
    "loader": ("Loader", "TensorBatch", "make_batches"),
    "packing": ("IGNORED", "Batch", "Batches", "PackedSequences", "packed_windows"),
    "preparation": ("prepare",),
    "tokenizer": ("Tokenizer", "load_tokenizer"),
    "tokenizer_training": ("train_tokenizer",),
}
_HOME = {name: f"mesanet.data.{module}" for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import a public name at its first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'mesanet.data' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value
