"""What a model is evaluated on, and how."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mesanet.config.base import ConfigError, check_fields, check_in_range, check_not_empty


@dataclass(frozen=True, kw_only=True)
class SolverOverride:
    """Changes to how the mesa layers solve; other layers have no solver."""

    max_steps: int | None = None
    """The most steps that a token may take; as the model says if not given."""
    tolerance: float | None = None
    """Relative residual at which a token stops, 0 for exactly max_steps steps; as the model says if not given."""

    preconditioner: Literal["auto", "none"] | None = None
    """none solves by the paper's plain method; as the model says if not given."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_steps is not None:
            check_in_range("max_steps", self.max_steps, 0)
        if self.tolerance is not None:
            check_in_range("tolerance", self.tolerance, 0, 1, high_open=True)

    @property
    def changes_anything(self) -> bool:
        """Whether something is given."""
        return (self.max_steps, self.tolerance, self.preconditioner) != (None, None, None)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Which tokens a model is evaluated on, and in which pieces."""

    data: Path
    """Folder that `mesanet data prepare` wrote, or a file or folder of text, which the model's tokenizer reads."""
    split: Literal["train", "validation"] = "validation"
    """Split of a prepared folder."""
    text_column: str = "text"
    """For text: field of a JSON record, or column of a table, that holds it."""
    separator: str | None = None
    """For text: what stands between the documents of a .txt file; without it a file is one document."""
    length: int = 2048
    """Documents are cut into windows of this many tokens, and each is read without the ones before it."""
    at_least: int = 0
    """Leave out documents of fewer tokens."""
    whole: bool = False
    """Leave out what remains of a document after its last whole window."""
    packed: bool = False
    """Fill up what is shorter than a window with further documents in a seeded order, BOS between them, as in training
    and as the paper evaluates; positions then count from the start of the window. Without it each document is read by
    itself."""
    max_tokens: int | None = None
    """Stop at this many tokens, taken from documents in a seeded order, or before it where windows have to be whole or
    are packed; None for all."""
    seed: int = 0
    """The order of documents where max_tokens is given, and that of packing."""
    piece: int = 2048
    """Tokens that are computed at once: windows that are longer are fed in pieces through the cache."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 computes the large products in it."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("length", "piece"):
            check_in_range(name, getattr(self, name), 1)
        check_in_range("at_least", self.at_least, 0)
        check_in_range("seed", self.seed, 0)
        if self.max_tokens is not None:
            check_in_range("max_tokens", self.max_tokens, 1)
        if self.separator is not None:
            check_not_empty("separator", self.separator)
        if self.whole and self.max_tokens is not None and self.max_tokens < self.length:
            raise ConfigError("max_tokens", f"got {self.max_tokens}, fewer than a whole window of {self.length}")
        if self.packed and self.max_tokens is not None and self.max_tokens < self.length:
            raise ConfigError("max_tokens", f"got {self.max_tokens}, fewer than a packed window of {self.length}")
        if self.packed and (self.whole or self.at_least):
            raise ConfigError("packed", "takes documents of every length: leave out whole and at_least")
        if self.data == Path():
            raise ConfigError("data", "must name prepared data or a text file, got an empty path")
