"""Models in folders: what is written comes back bit for bit, and what is broken is named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from mesanet.config.base import to_dict
from mesanet.config.model import ModelConfig
from mesanet.mixers import MIXERS
from mesanet.model import files as files_module
from mesanet.model.backbone import LanguageModel
from mesanet.model.files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    find_model,
    load_model,
    read_config,
    save_model,
    tokenizer_name,
)


def small(*mixers: str, **changes: object) -> LanguageModel:
    settings: dict[str, object] = {"layers": 2, "width": 32, "heads": 2, "key_size": 16, "vocabulary": 61, "window": 6}
    return LanguageModel(ModelConfig(mixers=mixers, **{**settings, **changes})).eval()  # type: ignore[arg-type]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_model(small("mesa"), tmp_path / "model")


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_comes_back_bit_for_bit(name: str, dtype: str, tmp_path: Path) -> None:
    model = small(name, dtype=dtype)
    again = load_model(save_model(model, tmp_path))
    tokens = torch.randint(61, (2, 12))
    assert again.config == model.config
    assert torch.equal(again(tokens)[0], model(tokens)[0])
    assert all(parameter.requires_grad for parameter in again.parameters())
    assert sorted(path.name for path in tmp_path.iterdir()) == [CONFIG_FILE, WEIGHTS_FILE]


def test_a_changed_model_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    model = small("mesa").to(torch.bfloat16)
    model.set_solver(max_steps=1, tolerance=0.0)
    again = load_model(save_model(model, tmp_path))
    tokens = torch.randint(61, (2, 12))
    assert again.embedding.weight.dtype == torch.bfloat16
    assert torch.equal(again(tokens)[0], model(tokens)[0])
    assert again.config.inference_solver.max_steps == 1


@pytest.mark.parametrize("changes", [{"width": 16}, {"rope_base": 500.0}])
@pytest.mark.parametrize("cut", ["write_atomic", "write_json_atomic"])
def test_a_save_over_another_model_that_is_cut_off_leaves_one_of_the_two(
    changes: dict[str, object], cut: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether their weights have the same shapes or not."""
    old, new = small("attention"), small("attention", **changes)
    save_model(old, tmp_path)
    tokens = torch.randint(61, (2, 12))
    with monkeypatch.context() as patch:
        patch.setattr(files_module, cut, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            save_model(new, tmp_path)
    remains, again = old if cut == "write_atomic" else new, load_model(tmp_path)
    assert again.config == remains.config
    assert torch.equal(again(tokens)[0], remains(tokens)[0])
    assert load_model(save_model(new, tmp_path)).config == new.config


def test_a_config_that_was_changed_by_hand_counts(tmp_path: Path) -> None:
    """Also beside weights that have been saved over others."""
    for _ in range(2):
        save_model(small("attention"), tmp_path)
    path = tmp_path / CONFIG_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_base": 500.0}))
    assert load_model(tmp_path).config.rope_base == 500


def test_a_truncated_weight_file_is_named(saved: Path) -> None:
    weights = saved / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load_model(saved)
    weights.write_bytes(b"something else entirely")
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load_model(saved)
    weights.unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors is missing"):
        load_model(saved)


def test_weights_that_do_not_fit_are_named(saved: Path) -> None:
    weights = load_file(saved / WEIGHTS_FILE)
    save_file({**weights, "stranger": torch.ones(1)}, saved / WEIGHTS_FILE)
    with pytest.raises(ValueError, match="has, but this model does not, stranger"):
        load_model(saved)
    save_file({name: tensor for name, tensor in weights.items() if name != "norm.weight"}, saved / WEIGHTS_FILE)
    with pytest.raises(ValueError, match=r"does not have norm\.weight"):
        load_model(saved)
    save_file({**weights, "norm.weight": torch.ones(3)}, saved / WEIGHTS_FILE)
    with pytest.raises(ValueError, match=r"norm\.weight of shape \(3,\), expected \(32,\)"):
        load_model(saved)
    for dtype in (torch.int64, torch.bool):
        save_file({**weights, "norm.weight": torch.ones(32, dtype=dtype)}, saved / WEIGHTS_FILE)
        with pytest.raises(ValueError, match=rf"has norm\.weight of type {dtype}, expected floating point numbers"):
            load_model(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"widht": 3}, "did you mean 'width'"),
        ({"mixers": ["messa"]}, "did you mean 'mesa'"),
        ({"layers": "two"}, "layers: .*a whole number"),
        ({"gamma_cap": 1.5}, "gamma_cap: got 1.5"),
        ({"model_type": "llama"}, "of a model of type 'llama'"),
    ],
)
def test_a_wrong_config_is_named(saved: Path, change: dict[str, object], message: str) -> None:
    path = saved / CONFIG_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=r"config\.json.*" + message):
        load_model(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 3}, "'layers' is no setting at this place; did you mean 'layers' inside 'mesanet'?"),
        ({"widht": 3}, "'widht' is no setting at this place; did you mean 'width' inside 'mesanet'?"),
        ({"mesa_net": {}}, "'mesa_net' is no setting at this place; did you mean 'mesanet'?"),
    ],
)
def test_a_setting_outside_its_table_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    """In the config that the transformers wrapper writes; what transformers and users put beside it stays allowed."""
    model = small("gla")
    wrapper = {"model_type": "mesanet", "mesanet": to_dict(model.config), "dtype": "float32", "use_cache": True}
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**wrapper, "vocab_size": 61, "my_note": "about it"}))
    assert read_config(tmp_path) == (model.config, True)
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**wrapper, **change}))
    with pytest.raises(ValueError, match=re.escape(message)):
        read_config(tmp_path)
    transformers = pytest.importorskip("transformers")
    import mesanet.model.hf  # noqa: F401 - tells transformers of the models

    with pytest.raises(ValueError, match=re.escape(message)):
        transformers.AutoConfig.from_pretrained(tmp_path)


def test_the_newest_model_of_a_run_is_found(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no model"):
        find_model(tmp_path)
    with pytest.raises(ValueError, match="is no folder"):
        find_model(tmp_path / "absent")
    for step in (9, 100, 20):
        save_model(small("gla"), tmp_path / "checkpoints" / f"step-{step}")
    assert find_model(tmp_path).name == "step-100"
    assert find_model(tmp_path / "checkpoints" / "step-9").name == "step-9"
    for aside in (".step-200.partial", "step-200.damaged"):
        save_model(small("gla"), tmp_path / "checkpoints" / aside)
    assert find_model(tmp_path).name == "step-100"
    save_model(small("gla"), tmp_path / "model")
    assert find_model(tmp_path).name == "model"


def test_the_tokenizer_is_the_one_beside_the_model_or_told_by_the_vocabulary(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "step-1"
    folder.mkdir(parents=True)
    assert tokenizer_name(tmp_path / "run", folder, 50257) == "gpt2"
    with pytest.raises(ValueError, match="--tokenizer"):
        tokenizer_name(tmp_path / "run", folder, 61)
    (tmp_path / "tokenizer.json").touch()
    assert tokenizer_name(tmp_path / "run", folder, 257) == "bytes"
    (tmp_path / "run" / "tokenizer.json").touch()
    assert tokenizer_name(tmp_path / "run", folder, 257) == str(tmp_path / "run" / "tokenizer.json")
