"""Generation: the cache, the batch and the pieces of a prompt leave no trace in what is generated."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mesanet.config.generation import GenerationConfig
from mesanet.config.model import ModelConfig
from mesanet.mixers import MIXERS
from mesanet.model.backbone import LanguageModel
from mesanet.model.generate import generate, stream
from mesanet.model.sampling import Sampler, truncated
from mesanet.model.text import TextStream, stream_text, terminal_safe

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12], [3]]


def small(*mixers: str, vocabulary: int = 61) -> LanguageModel:
    torch.manual_seed(0)
    # Float64, so that no rounding can decide between two tokens that are nearly as likely.
    return LanguageModel(
        ModelConfig(
            mixers=mixers, layers=2, width=32, heads=2, key_size=16, vocabulary=vocabulary, window=6, dtype="float64"
        )
    )


PATTERNS = [
    *((name,) for name in MIXERS),
    ("hawk", "mesa"),
    ("sliding_window", "gated_deltanet"),
    ("attention", "mesa"),
]


@pytest.fixture(params=["attention", "sliding_window", "mesa", "hawk"])
def model(request: pytest.FixtureRequest) -> LanguageModel:
    return small(request.param)


def test_greedy_is_the_argmax_of_the_whole_sequence(model: LanguageModel) -> None:
    model.eval()
    tokens = list(PROMPTS[1])
    for _ in range(10):
        tokens.append(int(model(torch.tensor([tokens]))[0][0, -1].argmax()))
    assert generate(model, [PROMPTS[1]], GenerationConfig(max_tokens=10, temperature=0)) == [tokens[9:]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("pattern", PATTERNS, ids="-".join)
def test_batch_and_pieces_leave_no_trace(pattern: tuple[str, ...], temperature: float) -> None:
    model = small(*pattern)
    config = GenerationConfig(max_tokens=15, temperature=temperature, top_k=20, top_p=0.9)
    together = generate(model, PROMPTS, config)
    pieces = GenerationConfig(max_tokens=15, temperature=temperature, top_k=20, top_p=0.9, prefill_chunk=2)
    assert generate(model, PROMPTS, pieces) == together
    for row, prompt in enumerate(PROMPTS):
        assert generate(model, [prompt], config) == together[row : row + 1]
    assert model.training
    assert all(len(row) == 15 for row in together)


def test_a_stop_id_ends_its_row_only(model: LanguageModel) -> None:
    free = generate(model, PROMPTS, GenerationConfig(max_tokens=15, seed=3))
    stop = free[0][4]
    config = GenerationConfig(max_tokens=15, seed=3, stop_ids=(stop,))
    expected = [row[: row.index(stop)] if stop in row else row for row in free]
    assert generate(model, PROMPTS, config) == expected


def test_generation_goes_on_from_a_cache(model: LanguageModel) -> None:
    model.eval()
    config = GenerationConfig(max_tokens=5, temperature=0)
    with torch.no_grad():
        _, cache = model(torch.tensor([PROMPTS[1][:6]] * 2))
    longer = [[*PROMPTS[1][:6], 7], [*PROMPTS[1][:6], 8, 9]]
    assert generate(model, [[7], [8, 9]], config, cache) == generate(model, longer, config)


def test_a_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    model = small("gla")
    runs = [generate(model, PROMPTS, GenerationConfig(max_tokens=20, seed=seed)) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_the_random_numbers_belong_to_the_prompt_and_not_to_its_place() -> None:
    """Equal prompts get a stream each, in their order."""
    model = small("gla")
    config = GenerationConfig(max_tokens=20, temperature=5.0)
    first, second, third = [1, 2], [12], [1, 2]
    one, other, again = generate(model, [first, second, third], config)
    assert one != again
    assert generate(model, [second, third, first], config) == [other, one, again]
    assert generate(model, [third], config) == [one]


def test_sampling_follows_the_probabilities() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0]])
    sampler = Sampler(GenerationConfig(temperature=0.5), [[1]])
    draws = torch.stack([sampler.choose(logits, [0]) for _ in range(4000)]).flatten()
    frequencies = torch.bincount(draws, minlength=4) / 4000
    # Four standard deviations of a frequency out of 4000 draws are at most 0.032.
    torch.testing.assert_close(frequencies, (logits[0] / 0.5).softmax(-1), atol=0.032, rtol=0)


def test_top_k_and_top_p_keep_the_right_tokens() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()[:, [2, 0, 3, 1]]

    def kept(**settings: float) -> list[int]:
        return (truncated(logits, GenerationConfig(**settings))[0] > -torch.inf).nonzero().flatten().tolist()  # type: ignore[arg-type]

    assert kept(top_k=2) == [1, 3]
    assert kept(top_k=9) == [0, 1, 2, 3]
    assert kept(top_p=0.3) == [1]
    assert kept(top_p=0.69) == [1, 3]
    assert kept(top_p=0.75) == [0, 1, 3]
    assert kept(top_p=1.0) == [0, 1, 2, 3]
    assert kept(top_k=2, top_p=0.5) == [1]


def test_top_k_keeps_no_more_where_tokens_are_alike() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    kept = truncated(logits, GenerationConfig(top_k=2)) > -torch.inf
    assert kept.sum(dim=-1).tolist() == [2, 2]
    assert not kept[0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("pattern", ["attention", "gla", "hawk"])
def test_a_model_that_has_diverged_is_refused(pattern: str, temperature: float) -> None:
    """Whether a rule refuses its gates, or the logits come out as no numbers."""
    model = small(pattern)
    with torch.no_grad():
        model.embedding.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"^the model's (logits|numbers) .*it has diverged"):
        generate(model, PROMPTS, GenerationConfig(temperature=temperature, max_tokens=3))


def test_stop_ids_may_be_a_list() -> None:
    assert GenerationConfig(stop_ids=[3]) == GenerationConfig(stop_ids=(3,))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings", [{"top_p": 1e-300}, {"top_p": 1e-300, "top_k": 5}, {"temperature": 1e-38}, {"temperature": 5e-324}]
)
def test_extreme_settings_leave_the_most_likely_token(settings: dict[str, float]) -> None:
    logits = torch.tensor([[25.0, -30.0, 30.0, 29.9], [0.0, 0.1, 0.0, 0.0]])
    sampler = Sampler(GenerationConfig(**settings), [[1], [2]])  # type: ignore[arg-type]
    assert sampler.choose(logits, [0, 1]).tolist() == [2, 1]
    assert not truncated(logits, sampler.config).isnan().any()


def test_streaming_yields_as_it_goes() -> None:
    model = small("gla")
    steps = stream(model, PROMPTS, GenerationConfig(max_tokens=1000))
    first = next(steps)
    assert first.rows == [0, 1, 2]
    assert len(first.tokens) == 3
    assert torch.is_grad_enabled()


def test_a_stop_id_outside_the_vocabulary_is_refused() -> None:
    model = small("gla")
    with pytest.raises(ValueError, match="stop_ids: got 61, expected ids from 0 to 60"):
        stream(model, PROMPTS, GenerationConfig(stop_ids=(60, 61)))
    with pytest.raises(ValueError, match="stop_ids: got -1"):
        GenerationConfig(stop_ids=(-1,))


@pytest.mark.parametrize(("prompts", "message"), [([[]], "number 0 is empty"), ([[1], [61]], "number 1 has a token")])
def test_bad_prompts_are_named(prompts: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        # By the call itself, before the first token is asked for.
        stream(small("gla"), prompts)


def test_nothing_to_do() -> None:
    assert generate(small("gla"), []) == []
    assert generate(small("gla"), [[1]], GenerationConfig(max_tokens=0)) == [[]]


@pytest.mark.parametrize(
    "settings", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_k": 0}, {"max_tokens": -1}, {"prefill_chunk": 0}]
)
def test_bad_settings_are_named(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        GenerationConfig(**settings)  # type: ignore[arg-type]


class Bytes:
    vocabulary = 257
    bos = 256

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


@given(st.text(max_size=200), st.lists(st.text(min_size=1, max_size=4), max_size=3))
def test_text_arrives_whole_and_ends_before_a_stop_string(text: str, stop: list[str]) -> None:
    text = text.encode(errors="replace").decode()
    streamed = TextStream(Bytes().decode, stop)
    shown = ""
    for token in text.encode():
        shown += streamed.add(token)
        assert "\ufffd" not in shown or "\ufffd" in text
    shown += streamed.finish()
    # The place where the first stop string is complete decides, as it does for whoever reads along.
    ends = [(text.find(string) + len(string), text.find(string)) for string in stop if string in text]
    assert shown == (text if not ends else text[: min(place for end, place in ends if end == min(ends)[0])])


def test_bytes_that_are_no_text_are_shown_as_they_come() -> None:
    """And in time that grows with their number only: every byte is decoded together with a bounded number of others."""
    decoded = 0

    def decode(tokens: list[int]) -> str:
        nonlocal decoded
        decoded += len(tokens)
        return bytes(tokens).decode(errors="replace")

    streamed = TextStream(decode)
    for count in range(1, 3001):
        streamed.add(0x80)
        assert count < 1000 or decoded < 150 * count
    shown = TextStream(decode)
    text = "".join(shown.add(0x80) for _ in range(500))
    assert len(text) == 497
    assert text + shown.finish() == "\ufffd" * 500


@given(st.lists(st.integers(0, 255), max_size=300))
def test_any_bytes_arrive_whole(values: list[int]) -> None:
    streamed = TextStream(Bytes().decode)
    shown = "".join(streamed.add(value) for value in values)
    assert shown + streamed.finish() == Bytes().decode(values)


@pytest.mark.parametrize("word", ["a", "\u20ac"])
def test_a_decoder_that_drops_the_first_space_loses_none(word: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"\u2581{word}": 0, "\u2581b": 1, "c": 2}, unk_token="c")
    )
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    tokens = [0, 1, 2] * 80
    streamed = TextStream(tokenizer.decode)
    pieces = [streamed.add(token) for token in tokens]
    assert "".join(pieces) + streamed.finish() == tokenizer.decode(tokens)
    assert all(pieces)


def test_long_runs_of_byte_tokens_stay_characters() -> None:
    """A decoder that gives up on all bytes of a run if they do not begin with a whole character."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {f"<0x{value:02X}>": value for value in range(256)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])
    text = "\u20ac\U0001f600\u00e4" * 60
    streamed = TextStream(tokenizer.decode)
    shown = "".join(streamed.add(value) for value in text.encode())
    assert shown + streamed.finish() == text


def test_text_of_a_model() -> None:
    model = small("gla", vocabulary=257)
    config = GenerationConfig(max_tokens=80, seed=4)
    pieces = list(stream_text(model, Bytes(), "ab", config))
    tokens = generate(model, [[256, 97, 98]], config)[0]
    if 256 in tokens:
        tokens = tokens[: tokens.index(256)]
    assert "".join(pieces) == Bytes().decode(tokens)
    assert len(pieces) > 10
    with pytest.raises(ValueError, match="the tokenizer has 257 tokens, but the model's vocabulary is only 61"):
        stream_text(small("gla"), Bytes(), "ab")


def test_text_cannot_steer_the_terminal() -> None:
    assert terminal_safe("ä\n\tb\x1b[31m\x07\x9b\r") == "ä\n\tb\ufffd[31m\ufffd\ufffd\ufffd"
