"""How text is generated."""

from __future__ import annotations

from dataclasses import dataclass

from mesanet.config.base import check_fields, check_in_range, check_positive


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How tokens are chosen, and when to stop."""

    max_tokens: int = 256
    """The most tokens to generate."""
    temperature: float = 1.0
    """Logits are divided by this before sampling; 0 takes the most likely token."""
    top_k: int | None = None
    """Sample among this many most likely tokens only."""
    top_p: float | None = None
    """Sample among the fewest most likely tokens that together have this probability."""
    seed: int = 0
    """The same seed gives a prompt the same tokens, whatever it shares a batch with; equal prompts differ by order."""
    stop_ids: tuple[int, ...] = ()
    """A sequence ends at any of these token ids, which are not returned."""
    prefill_chunk: int = 1024
    """Prompts are read in pieces of this many tokens, which bounds the memory that long ones take."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_in_range("max_tokens", self.max_tokens, 0)
        for token in self.stop_ids:
            check_in_range("stop_ids", token, 0)
        check_in_range("temperature", self.temperature, 0, 1e6)
        check_positive("prefill_chunk", self.prefill_chunk)
        if self.top_k is not None:
            check_positive("top_k", self.top_k)
        if self.top_p is not None:
            check_in_range("top_p", self.top_p, 0, 1, low_open=True)
