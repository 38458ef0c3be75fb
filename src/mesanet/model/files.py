"""Models as folders: config.json beside model.safetensors."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mesanet.config.base import ConfigError, from_dict, to_dict, to_json
from mesanet.config.model import ModelConfig
from mesanet.io import file_digest, read_json, write_atomic, write_json_atomic
from mesanet.model.backbone import DTYPES, LanguageModel

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
"""Says which file holds which weight, where transformers has cut a large model into several."""
FINISHED = "model"
"""Where a run folder keeps the model once training is done."""
TOKENIZER_FILE = "tokenizer.json"
BUILT_IN_TOKENIZERS = {257: "bytes", 50257: "gpt2"}
"""By vocabulary."""
MODEL_TYPE = "mesanet"
LIKE_OURS = 0.8
"""How like the name of a setting another name has to be, of 1, to count as the same misspelt."""
CONFIG_TO_COME, CONFIG_BEFORE = "config", "config_before"
"""What the weights tell of a save over another model: their config, and the checksum of the file that it replaces.

The two files can't be replaced in one go. Where the old config still lies beside the new weights, the save was cut off
in between, and the new config is the one in here; any other config beside them is there on purpose.
"""
WRAPPER_PREFIX = "model."
"""What the transformers wrapper puts before the names of our weights."""


def save_model(model: LanguageModel, folder: str | os.PathLike[str]) -> Path:
    """Write a model's config and weights into a folder; of another model there, one of the two remains whole."""
    from safetensors.torch import save

    config, target = model.config, Path(folder)
    metadata = {"format": "pt"}
    if (target / CONFIG_FILE).is_file():
        metadata |= {CONFIG_TO_COME: to_json(config), CONFIG_BEFORE: file_digest(target / CONFIG_FILE)}
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    write_atomic(target / WEIGHTS_FILE, lambda file: file.write(save(weights, metadata=metadata)))
    write_json_atomic(target / CONFIG_FILE, to_dict(config))
    return target


def load_model(folder: str | os.PathLike[str], *, device: torch.device | str = "cpu") -> LanguageModel:
    """Read a model that `save_model`, or the transformers wrapper's `save_pretrained`, has written; in eval mode."""
    source = Path(folder)
    check_device(device)
    config, wrapped = read_config(source)
    with torch.device("meta"):
        try:
            model = LanguageModel(config)
        except ValueError as error:
            raise ValueError(f"{source / CONFIG_FILE}: {error}") from error
    weights, file = read_all_weights(source, device)
    if wrapped:
        weights = {name.removeprefix(WRAPPER_PREFIX): tensor for name, tensor in weights.items()}
    set_weights(model, weights, file)
    return model.eval()


def find_model(folder: str | os.PathLike[str]) -> Path:
    """The folder itself if it holds a model; of a run folder, the finished model, or else the newest checkpoint."""
    source = Path(folder)
    if not source.is_dir():
        raise ValueError(f"{source} is no folder")
    for place in (source, source / FINISHED):
        if _holds_model(place):
            return place
    # A name that begins with a dot, or has an ending, is not whole yet or has been put aside.
    found = [path.parent for path in source.glob(f"**/{CONFIG_FILE}") if _holds_model(path.parent)]
    whole = [path for path in found if not any("." in part for part in path.relative_to(source).parts)]
    if not whole:
        raise ValueError(f"{source} holds no model: neither it nor a folder in it has {CONFIG_FILE} and {WEIGHTS_FILE}")
    return max(
        whole, key=lambda path: [int(number) for number in re.findall(r"\d+", path.relative_to(source).as_posix())]
    )


def _holds_model(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file() and any((folder / name).is_file() for name in (WEIGHTS_FILE, INDEX_FILE))


def tokenizer_name(run: Path, folder: Path, vocabulary: int) -> str:
    """The tokenizer.json beside a model or in its run folder, else the built-in tokenizer with this vocabulary."""
    for place in (folder, *folder.parents):
        if (place / TOKENIZER_FILE).is_file():
            return str(place / TOKENIZER_FILE)
        if place == run:
            break
    if vocabulary not in BUILT_IN_TOKENIZERS:
        raise ValueError(f"which tokenizer {folder} was trained with can't be told: name it with --tokenizer")
    return BUILT_IN_TOKENIZERS[vocabulary]


def read_config(folder: Path) -> tuple[ModelConfig, bool]:
    """The model config in a folder, and whether the transformers wrapper wrote it."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{folder} holds no model: there is no {CONFIG_FILE} in it")
    values: Any = _config_to_come(folder) or read_json(path)
    if not isinstance(values, Mapping):
        raise ValueError(f"{path} must hold a table of model settings, got {type(values).__name__}")
    wrapped = "model_type" in values
    if wrapped and values["model_type"] != MODEL_TYPE:
        raise ValueError(f"{path} is of a model of type {values['model_type']!r}, expected {MODEL_TYPE!r}")
    if wrapped:
        check_outside(values, path)
    try:
        return from_dict(ModelConfig, values.get(MODEL_TYPE, {}) if wrapped else values), wrapped
    except ConfigError as error:
        raise ValueError(f"{path}: {error}") from error


def _config_to_come(folder: Path) -> Any:
    """The config that belongs to the weights, where it was to replace the one that still lies beside them."""
    from safetensors import SafetensorError, safe_open

    if not (folder / WEIGHTS_FILE).is_file():
        return None
    try:
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
            metadata = file.metadata() or {}
    except SafetensorError:
        # Whoever reads the weights says so.
        return None
    if CONFIG_BEFORE not in metadata or metadata[CONFIG_BEFORE] != file_digest(folder / CONFIG_FILE):
        return None
    return json.loads(metadata[CONFIG_TO_COME])


def check_outside(values: Mapping[str, Any], path: Path | str) -> None:
    """Refuse settings of ours, misspelt or not, that stand outside their table, where nobody would read them.

    Other names may be those of transformers, whose versions differ, or notes of whoever saved the model.
    """
    # transformers keeps a data type of its own there.
    ours = [MODEL_TYPE, *(field.name for field in fields(ModelConfig) if field.name != "dtype")]
    for name in values.keys() - {MODEL_TYPE}:
        close = get_close_matches(name, ours, n=1, cutoff=LIKE_OURS)
        if close:
            meant = repr(MODEL_TYPE) if close[0] == MODEL_TYPE else f"{close[0]!r} inside {MODEL_TYPE!r}"
            raise ValueError(f"{path}: {name!r} is no setting at this place; did you mean {meant}?")


def read_all_weights(folder: Path, device: torch.device | str = "cpu") -> tuple[dict[str, Tensor], Path]:
    """The weights in a folder, and the file that says which: one file with all, or the index of several."""
    index = folder / INDEX_FILE
    if (folder / WEIGHTS_FILE).is_file() or not index.is_file():
        return read_weights(folder / WEIGHTS_FILE, device), folder / WEIGHTS_FILE
    content: Any = read_json(index)
    places = content.get("weight_map") if isinstance(content, Mapping) else None
    if not isinstance(places, Mapping) or not all(isinstance(name, str) for name in places.values()):
        raise ValueError(f"{index} has no weight_map that says which file holds which weight")
    weights: dict[str, Tensor] = {}
    for name in sorted(set(places.values())):
        # A file of the folder itself: whoever made the index should not choose what else is read.
        if Path(name).name != name:
            raise ValueError(f"{index} names {name!r}, expected the name of a file beside it")
        weights |= read_weights(folder / name, device)
    return weights, index


def read_weights(path: Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The tensors of a safetensors file, or a ValueError that names the file and what is wrong with it."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise ValueError(f"{path} is missing")
    try:
        weights: dict[str, Tensor] = load_file(path, device=str(device))
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from error
    return weights


def check_device(device: torch.device | str) -> None:
    """Refuse a device that is misspelt or absent."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"device: got {str(device)!r}, which can't be used here: {reason}") from error


def set_weights(model: LanguageModel, weights: Mapping[str, Tensor], source: os.PathLike[str] | str) -> None:
    """Put weights into a model, which may be on the meta device; a ValueError says which do not belong or lack."""
    expected = model.state_dict()
    problems = [
        *_named("does not have", sorted(expected.keys() - weights.keys())),
        *_named("has, but this model does not,", sorted(weights.keys() - expected.keys())),
        *(
            f"has {name} of shape {tuple(weights[name].shape)}, expected {tuple(tensor.shape)}"
            for name, tensor in expected.items()
            if name in weights and weights[name].shape != tensor.shape
        ),
        *(
            f"has {name} of type {weights[name].dtype}, expected floating point numbers"
            for name in expected
            if name in weights and not weights[name].is_floating_point()
        ),
    ]
    if problems:
        more = f" (and {len(problems) - 1} more such problems)" if len(problems) > 1 else ""
        raise ValueError(f"{os.fspath(source)} does not fit its config: it {problems[0]}{more}")
    dtype = DTYPES[model.config.dtype]
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in weights.items()}, assign=True)


def _named(problem: str, names: Iterable[str]) -> list[str]:
    return [f"{problem} {name}" for name in names]
