"""Generation of text: tokens become characters as soon as no later token can change them."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from mesanet.config.generation import GenerationConfig
from mesanet.model.backbone import LanguageModel
from mesanet.model.generate import DEFAULTS, Step, stream

LONGEST_REDECODED = 64
"""Tokens that are decoded again together with a new one: decoding all of them each time would be quadratic."""
LEFT_CONTEXT = 8
"""Tokens that are kept when the others are let go: some decoders drop a space in front of the first one they get."""
LONGEST_CUT = 3
"""U+FFFD at the end that may stand for a character yet: as many as the bytes that one can be short of its last."""


class TextCodec(Protocol):
    """What generation needs of a tokenizer."""

    vocabulary: int
    """Number of token ids."""
    bos: int
    """The token between documents."""

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Any]:
        """Turn each text into its tokens."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Turn tokens into text; incomplete characters at the end become U+FFFD."""
        ...


def stream_text(
    model: LanguageModel,
    tokenizer: TextCodec,
    prompt: str,
    config: GenerationConfig = DEFAULTS,
    stop: Sequence[str] = (),
) -> Iterator[str]:
    """Continue a text piece by piece, up to BOS, the first of the `stop` strings, or `config.max_tokens`.

    What does not fit is refused by the call itself, before anything is generated.
    """
    if tokenizer.vocabulary > model.config.vocabulary:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocabulary} tokens, but the model's vocabulary is only "
            f"{model.config.vocabulary}: it was trained with another tokenizer"
        )
    tokens = [tokenizer.bos, *map(int, tokenizer.encode_batch([prompt])[0])]
    return _pieces(stream(model, [tokens], config), tokenizer, TextStream(tokenizer.decode, stop))


def _pieces(steps: Iterator[Step], tokenizer: TextCodec, text: TextStream) -> Iterator[str]:
    """The text of a single sequence's tokens, up to BOS or a stop string."""
    for step in steps:
        token = step.tokens[0]
        if token == tokenizer.bos:
            break
        piece = text.add(token)
        if piece:
            yield piece
        if text.ended:
            return
    rest = text.finish()
    if rest:
        yield rest


class TextStream:
    """Turns tokens into pieces of text as soon as no later token can change them."""

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = [text for text in stop if text]
        self._tokens: list[int] = []
        self._shown = 0
        self._waiting = 0
        self._pending = ""
        self.ended = False
        """Whether a stop string has come; nothing more is shown after it."""

    def add(self, token: int) -> str:
        """The text that this token settles."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        self._waiting = self._waiting + 1 if text.endswith("\ufffd") else 0
        # So long a character may still get its last bytes. Until then nothing is settled: some decoders give up on a
        # whole run of bytes for as long as its last character is not complete.
        if self._waiting > LONGEST_CUT or not self._waiting:
            settled = max(_settled(text), self._shown)
            self._pending += text[self._shown : settled]
            self._shown = settled
        if len(self._tokens) >= LONGEST_REDECODED:
            self._let_go(text)
        return self._settle(final=False)

    def finish(self) -> str:
        """The rest."""
        if self._tokens and not self.ended:
            self._pending += self._decode(self._tokens)[self._shown :]
        return self._settle(final=True)

    def _let_go(self, text: str) -> None:
        """Keep the last tokens only, where they alone give the end of the text, as in the middle of a character not."""
        for kept in range(LEFT_CONTEXT, LEFT_CONTEXT + LONGEST_CUT + 1):
            tail = self._decode(self._tokens[-kept:])
            if text.endswith(tail) and _settled(tail) - len(tail) == self._shown - len(text):
                self._tokens, self._shown = self._tokens[-kept:], _settled(tail)
                return

    def _settle(self, *, final: bool) -> str:
        """The part of the pending text that no stop string can begin in."""
        if self.ended:
            return ""
        found = [place for place in (self._pending.find(stop) for stop in self._stop) if place >= 0]
        if found:
            self.ended = True
            return self._pending[: min(found)]
        held = 0 if final else max((_overlap(self._pending, stop) for stop in self._stop), default=0)
        text = self._pending[: len(self._pending) - held]
        self._pending = self._pending[len(self._pending) - held :]
        return text


def _settled(text: str) -> int:
    """How many characters of a decoded text no later token can change."""
    cut = len(text) - len(text.rstrip("\ufffd"))
    return len(text) - min(cut, LONGEST_CUT)


def terminal_safe(text: str) -> str:
    """The text without the control characters by which it could move the cursor or change colours."""
    return "".join(
        character if character in "\n\t" or unicodedata.category(character) != "Cc" else "\ufffd" for character in text
    )


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters of `text` could be the beginning of `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-size:])), 0)
