"""What is compared, and on what it is evaluated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mesanet.config.base import check_fields, check_in_range, check_not_empty
from mesanet.config.generation import GenerationConfig


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Mixers that are trained on the same data in the same order, and how they are evaluated."""

    preset: str
    """The training run, as for `mesanet train`."""
    mixers: tuple[str, ...]
    """Mixers, or patterns of them such as hawk-mesa; a comma separates one from the next."""
    out: Path
    """Folder for the runs and the report."""
    data: Path | None = None
    """Folder that `mesanet data prepare` wrote, instead of the preset's data."""
    steps: int | None = None
    """Updates of each model, instead of the preset's number."""
    precision: Literal["float32", "bfloat16"] | None = None
    """Precision of training, instead of the preset's; evaluations are in float32 in any case."""
    parallel: Literal["none", "ddp", "fsdp"] | None = None
    """How several processes share the training, instead of the preset's way; torchrun starts the processes."""
    accumulation: int | None = None
    """Parts that a process cuts its sequences of a step into, instead of the preset's number."""
    activation_checkpointing: bool | None = None
    """Compute activations again on the way back instead of keeping them; None does as the preset does."""
    device: Literal["auto", "cpu", "cuda"] | None = None
    """Where to compute, instead of where the preset does."""
    tokens: int = 1 << 18
    """Held-out tokens for perplexity and for the loss by position, at most."""
    longest: int = 16
    """Length extrapolation goes up to this multiple of the training length, as far as documents allow; 1 for none."""
    longest_tokens: int = 1 << 19
    """Tokens for length extrapolation, at most."""
    solver_steps: tuple[int, ...] = (0, 1, 2, 4, 8, 16, 30)
    """Numbers of steps for the curve of the mesa models' loss against fixed solver steps, which are plain conjugate
    gradient steps, without a preconditioner."""
    solver_tolerances: tuple[float, ...] = (0.5, 0.1, 1e-2, 1e-3, 1e-4, 1e-5)
    """Tolerances for the same with as many steps as each token needs."""
    solver_tokens: int = 1 << 16
    """Tokens for each point of these curves, at most."""
    prompt: str = "def "
    """What the sample of generated text begins with."""
    sample_tokens: int = 200
    """Length of that sample."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_not_empty("mixers", self.mixers)
        for name in ("tokens", "longest", "longest_tokens", "solver_tokens", "sample_tokens"):
            check_in_range(name, getattr(self, name), 1)
        for name in ("steps", "accumulation"):
            if getattr(self, name) is not None:
                check_in_range(name, getattr(self, name), 1)
        for steps in self.solver_steps:
            check_in_range("solver_steps", steps, 0)
        for tolerance in self.solver_tolerances:
            check_in_range("solver_tolerances", tolerance, 0, 1, low_open=True, high_open=True)

    @property
    def generation(self) -> GenerationConfig:
        """How the sample is drawn."""
        return GenerationConfig(max_tokens=self.sample_tokens, temperature=0.8, top_p=0.95, seed=1)
