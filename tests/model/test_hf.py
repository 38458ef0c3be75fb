"""The models in transformers generate what ours generate, and survive its files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from mesanet.config.generation import GenerationConfig
from mesanet.config.model import ModelConfig
from mesanet.mixers import MIXERS
from mesanet.model.backbone import LanguageModel
from mesanet.model.files import find_model, load_model, save_model
from mesanet.model.generate import generate, pad_left

transformers = pytest.importorskip("transformers")
hf = pytest.importorskip("mesanet.model.hf")

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [3]]
PATTERNS = [*((name,) for name in MIXERS), ("hawk", "mesa")]


def wrapped(*mixers: str) -> Any:
    torch.manual_seed(0)
    config = ModelConfig(mixers=mixers, layers=2, width=32, heads=2, key_size=16, vocabulary=61, window=6)
    return hf.from_language_model(LanguageModel(config).eval(), pad_token_id=0)


@pytest.mark.parametrize("pattern", PATTERNS, ids="-".join)
def test_generation_gives_our_tokens(pattern: tuple[str, ...]) -> None:
    """Batched and left-padded, greedy; and beam search, whose cache is reordered at every step."""
    model = wrapped(*pattern)
    tokens, mask = pad_left(PROMPTS, model.model)
    assert mask is not None
    options = {"attention_mask": mask.long(), "max_new_tokens": 12, "do_sample": False}
    ours = generate(model.model, PROMPTS, GenerationConfig(max_tokens=12, temperature=0))
    assert model.generate(tokens, **options)[:, tokens.shape[1] :].tolist() == ours
    with_cache = model.generate(tokens, num_beams=3, **options)
    assert torch.equal(with_cache, model.generate(tokens, num_beams=3, use_cache=False, **options))


@pytest.mark.parametrize("pattern", PATTERNS, ids="-".join)
def test_a_model_survives_their_files(pattern: tuple[str, ...], tmp_path: Path) -> None:
    model = wrapped(*pattern)
    tokens = torch.randint(61, (2, 9))
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is hf.MesaNetForCausalLM
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert torch.equal(load_model(tmp_path)(tokens)[0], model(tokens).logits)
    headless = transformers.AutoModel.from_pretrained(tmp_path)
    assert torch.equal(headless(tokens).last_hidden_state, model.model.hidden(tokens)[0])
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert half(tokens).logits.isfinite().all()


def test_the_config_carries_ours() -> None:
    ours = ModelConfig(mixers=("hawk", "mesa"), layers=2, width=32, heads=2, key_size=16, vocabulary=61)
    config = hf.MesaNetConfig.of(ours, eos_token_id=3)
    assert config.model_config == ours
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (61, 32, 2)
    again = hf.MesaNetConfig.from_dict(config.to_dict())
    assert again.model_config == ours
    assert again.eos_token_id == 3
    with pytest.raises(ValueError, match="did you mean 'width'"):
        hf.MesaNetConfig(mesanet={"widht": 3})


def test_the_loss_is_shifted_and_ignores_padding() -> None:
    model = wrapped("gla")
    tokens = torch.randint(61, (2, 9))
    labels = tokens.clone()
    labels[0, 5:] = -100
    output = model(tokens, labels=labels)
    expected = torch.nn.functional.cross_entropy(output.logits[:, :-1].mT, labels[:, 1:])
    torch.testing.assert_close(output.loss, expected)
    model.train()
    trained = model(tokens, labels=labels)
    assert trained.logits is None
    trained.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_resized_vocabulary_keeps_the_old_tokens(tmp_path: Path) -> None:
    model = wrapped("gla")
    tokens = torch.randint(61, (2, 9))
    before = model(tokens).logits
    model.resize_token_embeddings(70)
    after = model(tokens).logits
    assert after.shape[-1] == 70
    torch.testing.assert_close(after[..., :61], before)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(tokens).logits, after)
    assert again.config.model_config.vocabulary == 70


@pytest.mark.parametrize("how", ["from_pretrained", "to"])
def test_bfloat16_survives_the_files(how: str, tmp_path: Path) -> None:
    wrapped("mesa").save_pretrained(tmp_path / "full")
    if how == "to":
        half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "full").to(torch.bfloat16)
    else:
        half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "full", dtype=torch.bfloat16)
    tokens = torch.randint(61, (2, 9))
    expected = half(tokens).logits
    half.save_pretrained(tmp_path / "half")
    ours, theirs = (
        load_model(tmp_path / "half"), transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    )  # fmt: skip
    assert ours.embedding.weight.dtype == theirs.dtype == torch.bfloat16
    assert torch.equal(ours(tokens)[0], expected)
    assert torch.equal(theirs(tokens).logits, expected)


def test_a_resized_vocabulary_is_that_of_our_model(tmp_path: Path) -> None:
    model = wrapped("gla")
    model.resize_token_embeddings(70)
    assert model.model.config.vocabulary == model.config.vocab_size == 70
    again = load_model(save_model(model.model, tmp_path))
    config = GenerationConfig(max_tokens=3, temperature=0)
    assert generate(again, [[65]], config) == generate(model.model, [[65]], config)


def test_files_cut_into_shards_are_read(tmp_path: Path) -> None:
    model = wrapped("mesa")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert not (tmp_path / "model.safetensors").exists()
    tokens = torch.randint(61, (2, 9))
    assert find_model(tmp_path) == tmp_path
    assert torch.equal(load_model(tmp_path)(tokens)[0], model(tokens).logits)
    shard = next(tmp_path.glob("model-00002-*.safetensors"))
    shard.unlink()
    with pytest.raises(ValueError, match=f"{shard.name} is missing"):
        load_model(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"norm.weight": "../elsewhere.safetensors"}}))
    with pytest.raises(ValueError, match="expected the name of a file beside it"):
        load_model(tmp_path)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    wrapped("gla").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    weights = safetensors.torch.load(whole)
    load = transformers.AutoModelForCausalLM.from_pretrained
    missing = {name: tensor for name, tensor in weights.items() if name != "model.norm.weight"}
    for changed, message in [
        (missing, r"does not have .*norm\.weight"),
        ({**weights, "stranger": torch.ones(2)}, "has, but the model does not, stranger"),
    ]:
        safetensors.torch.save_file(changed, path, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=message):
            load(tmp_path)
    safetensors.torch.save_file({**weights, "model.norm.weight": torch.ones(3)}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"has model\.norm\.weight of shape \(3,\), expected \(32,\)"):
        load(tmp_path)
    assert torch.equal(load(tmp_path, ignore_mismatched_sizes=True).model.norm.weight, torch.ones(32))
    path.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load(tmp_path)
    path.write_bytes(whole)
    model, details = load(tmp_path, output_loading_info=True)
    assert isinstance(model, hf.MesaNetForCausalLM)
    assert not details["missing_keys"]


def test_hidden_states_are_the_residual_stream() -> None:
    """Also where padding stands at the right, and while generating."""
    model = wrapped("gla")
    tokens = torch.randint(61, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, 6:] = 0
    output = model(tokens, attention_mask=mask, output_hidden_states=True)
    alone = model(tokens[:1, :6], output_hidden_states=True)
    assert len(output.hidden_states) == 3
    for padded, single in zip(output.hidden_states, alone.hidden_states, strict=True):
        torch.testing.assert_close(padded[:1, :6], single)
    torch.testing.assert_close(output.hidden_states[0], model.get_input_embeddings()(tokens) * 32**0.5)
    torch.testing.assert_close(model.model.logits(output.hidden_states[-1]), output.logits)
    assert model(tokens).hidden_states is None
    generated = model.generate(tokens, max_new_tokens=2, return_dict_in_generate=True, output_hidden_states=True)
    assert len(generated.hidden_states) == 2


def test_logits_can_be_asked_for_by_place() -> None:
    model = wrapped("gla")
    tokens = torch.randint(61, (2, 9))
    whole = model(tokens).logits
    torch.testing.assert_close(model(tokens, logits_to_keep=torch.tensor([1, 5])).logits, whole[:, [1, 5]])
    torch.testing.assert_close(model(tokens, logits_to_keep=2).logits, whole[:, -2:])


def test_vectors_take_the_place_of_ids() -> None:
    model = wrapped("mesa")
    tokens, mask = pad_left(PROMPTS, model.model)
    assert mask is not None
    vectors = model.get_input_embeddings()(tokens)
    expected = model(tokens, attention_mask=mask.long()).logits
    actual = model(inputs_embeds=vectors, attention_mask=mask.long()).logits
    torch.testing.assert_close(actual[mask], expected[mask])
    options = {"attention_mask": mask.long(), "max_new_tokens": 4, "do_sample": False}
    generated = model.generate(tokens, **options)[:, tokens.shape[1] :]
    assert torch.equal(model.generate(inputs_embeds=vectors, **options)[:, -4:], generated)
    with pytest.raises(ValueError, match="input_ids: expected either"):
        model(tokens, inputs_embeds=vectors)


@pytest.mark.parametrize("name", ["position_ids", "output_attentions", "token_type_ids"])
def test_what_the_models_do_not_take_is_named(name: str) -> None:
    for model in (wrapped("gla"), hf.MesaNetModel(wrapped("gla").config)):
        tokens = torch.randint(61, (1, 4))
        with pytest.raises(ValueError, match=f"{name}: got Tensor"):
            model(tokens, **{name: torch.arange(4)[None]})
        assert model(tokens, **{name: None}) is not None


def test_a_fresh_process_loads_as_the_guide_says(tmp_path: Path) -> None:
    """Both orders of the imports; `import mesanet` alone stays without transformers."""
    wrapped("gla").save_pretrained(tmp_path)
    for first, second in [
        ("import mesanet.model.hf", "from transformers import AutoModelForCausalLM"),
        ("from transformers import AutoModelForCausalLM", "import mesanet.model.hf"),
    ]:
        code = f"{first}\n{second}\nprint(type(AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})).__name__)"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert result.stdout.strip() == "MesaNetForCausalLM", result.stderr
    code = "import sys, mesanet; mesanet.LanguageModel; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_activation_checkpointing_is_ours() -> None:
    model = wrapped("gla")
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    assert model.model.checkpoint_activations
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


def test_the_pipeline_generates_text() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {f"w{index}": index for index in range(61)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", padding_side="left")
    model = wrapped("mesa")
    pipeline = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    texts = ["w1 w2 w3", "w4 w5 w6 w7 w8 w9 w10"]
    results = pipeline(texts, max_new_tokens=6, do_sample=False, batch_size=2, return_full_text=False)
    ours = generate(model.model, PROMPTS[:2], GenerationConfig(max_tokens=6, temperature=0))
    assert [result[0]["generated_text"].split() for result in results] == [
        [f"w{token}" for token in row] for row in ours
    ]


def test_a_foreign_cache_and_cropping_are_refused() -> None:
    model = wrapped("gla")
    tokens = torch.randint(61, (1, 4))
    with pytest.raises(ValueError, match="past_key_values: got DynamicCache"):
        model(tokens, past_key_values=transformers.DynamicCache())
    with pytest.raises(ValueError, match="can't be shortened"):
        model(tokens, use_cache=True).past_key_values.crop(1)
