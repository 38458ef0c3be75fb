"""The models in transformers generate what ours generate, and survive its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mesanet.config.generation import GenerationConfig
from mesanet.config.model import ModelConfig
from mesanet.mixers import MIXERS
from mesanet.model.backbone import LanguageModel
from mesanet.model.files import load_model
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
