"""What a model is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Literal

from mesanet.config.base import ConfigError, check_fields, check_in_range, check_not_empty, check_positive

MIXER_NAMES = (
    "attention",
    "sliding_window",
    "mamba2",
    "gla",
    "deltanet",
    "gated_deltanet",
    "mlstm",
    "hawk",
    "longhorn",
    "mesa",
    "mesa_rls",
)
"""The mixers that the library has: a config can tell a misspelt name without importing any of them."""
SIGNED_MIXERS = ("mamba2", "gla", "gated_deltanet", "mesa")
"""Those of them whose forget gates can be negative."""
SMALLEST_RIDGE = 1e-6
"""Keys have length one: float32 loses a smaller regulariser beside their squares."""
_tables: list[Mapping[str, type]] = []


def accept_mixers(table: Mapping[str, type]) -> None:
    """Accept the mixers in this table too, as it is whenever a config is made."""
    _tables.append(table)


def takes_signed_gates(mixer: str) -> bool:
    """Whether the forget gates of this mixer can be negative: by its class where that is known, or else by its name."""
    kinds = [table[mixer] for table in _tables if mixer in table]
    return any(getattr(kind, "signed_gates", False) for kind in kinds) if kinds else mixer in SIGNED_MIXERS


@dataclass(frozen=True, kw_only=True)
class SolverConfig:
    """How accurately, and with what effort, the mesa mixer solves its systems."""

    max_steps: int = 30
    """The most conjugate gradient steps that a token may take."""
    tolerance: float = 1e-4
    """A token stops at this relative residual; 0 takes exactly max_steps steps, as the paper does."""
    preconditioner: Literal["auto"] | None = "auto"
    """"auto" gives the chunks that forget slowly a preconditioner; None is the paper's plain method."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_in_range("max_steps", self.max_steps, 0)
        check_in_range("tolerance", self.tolerance, 0, 1, high_open=True)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One language model: a pattern of mixers on the shared backbone. The defaults are the paper's small size."""

    mixers: tuple[str, ...] = ("mesa",)
    """The pattern of sequence mixers, repeated over the layers: ("hawk", "mesa") alternates."""
    width: int = 768
    """Size of the residual stream."""
    layers: int = 14
    """Number of residual blocks, each a mixer and an MLP."""
    heads: int = 6
    """Heads of every mixer."""
    key_size: int = 128
    """Size of a query and of a key of one head."""
    value_size: int | None = None
    """Size of a value of one head; None for the key size."""
    vocabulary: int = 50257
    """Number of token ids."""
    mlp_multiplier: float = 3.0
    """Hidden size of the MLP as a multiple of the width."""
    window: int = 1024
    """How many tokens, itself included, a token of sliding_window attends to."""
    rope_base: float = 10000.0
    """Base of the rotary frequencies of the attention mixers."""
    convolution_width: int = 4
    """Width of the causal convolution over queries and keys."""
    convolve_values: bool = False
    """Convolve the values as well."""
    training_solver: SolverConfig = field(default_factory=SolverConfig)
    """How the mesa mixer solves its systems while training."""
    inference_solver: SolverConfig = field(default_factory=lambda: SolverConfig(tolerance=1e-7))
    """How the mesa mixer solves its systems otherwise: tighter, so that generation does not depend on how it is cut."""
    ridge_initial: float = 1.0
    """The mesa mixer's regulariser at the start of training."""
    ridge_lower_bound: float = 0.25
    """What the learned regulariser can't fall below."""
    gamma_cap: float = 0.9975
    """Upper bound of mesa's forget gate at write = 1: gamma <- gamma * (1 - (1 - cap) * write^2); 1 for none."""
    gamma_range: Literal["positive", "signed"] = "positive"
    """Range of the scalar forget gates: "positive" is (0, 1), "signed" is (-1, 1), for state tracking.

    Signed gates can make mesa's systems indefinite unless the ridge is large: see docs/models.md.
    """
    forget_bias: tuple[float, float] = (3.0, 6.0)
    """Bias of the forget gates at the start, spread evenly over the heads from the first value to the second."""
    hawk_multiplier: float | None = None
    """State size of hawk as a multiple of the width; None gives hawk as many parameters as attention."""
    logits_cap: float = 30.0
    """Logits are capped softly: cap * tanh(logits / cap)."""
    norm_epsilon: float = 1e-6
    """Added to the mean square in every RMSNorm."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Data type of the parameters."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_not_empty("mixers", self.mixers)
        for name in self.mixers:
            _check_mixer(name)
        for name in ("width", "layers", "heads", "key_size", "vocabulary", "window", "convolution_width"):
            check_positive(name, getattr(self, name))
        if len(self.mixers) > self.layers:
            unused = ", ".join(self.mixers[self.layers :])
            problem = f"got {len(self.mixers)} for {self.layers} layers, which leaves {unused} unused"
            raise ConfigError("mixers", problem)
        for name in ("mlp_multiplier", "rope_base", "ridge_initial", "logits_cap", "norm_epsilon"):
            check_positive(name, getattr(self, name))
        for name in ("value_size", "hawk_multiplier"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        check_in_range("ridge_initial", self.ridge_initial, SMALLEST_RIDGE)
        for position, bias in enumerate(self.forget_bias):
            if not math.isfinite(bias):
                raise ConfigError(f"forget_bias[{position}]", f"got {bias!r}, expected a finite number")
        check_in_range("ridge_lower_bound", self.ridge_lower_bound, 0, self.ridge_initial, high_open=True)
        check_in_range("gamma_cap", self.gamma_cap, 0, 1, low_open=True)
        if self.key_size % 2 and {"attention", "sliding_window"} & set(self.mixers):
            raise ConfigError("key_size", f"got {self.key_size}, expected an even number for rotary positions")

    @property
    def head_value_size(self) -> int:
        """Size of a value of one head."""
        return self.key_size if self.value_size is None else self.value_size

    @property
    def mlp_width(self) -> int:
        """Hidden size of the MLP."""
        return max(1, round(self.width * self.mlp_multiplier))

    def mixer_of(self, layer: int) -> str:
        """Name of the mixer in this layer."""
        return self.mixers[layer % len(self.mixers)]


def _check_mixer(name: str) -> None:
    """Refuse a name that no table has, and suggest the nearest one."""
    names = list(dict.fromkeys(known for table in (MIXER_NAMES, *_tables) for known in table))
    if name in names:
        return
    close = get_close_matches(name, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigError("mixers", f"got {name!r}, expected some of {', '.join(names)}{hint}")
