"""A scan of learning rates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mesanet.config.base import check_fields, check_not_empty, check_positive


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Which mixers to train with which learning rates, and where."""

    mixers: tuple[str, ...] = ("mesa",)
    """Mixers, or patterns such as hawk-mesa, to train one after the other, with spaces or commas in between."""
    learning_rates: tuple[float, ...] = ()
    """Peak learning rates; the paper's for the length of the preset if none are given."""
    out: Path = Path("runs/sweep")
    """Folder of the sweep: a run folder for each mixer and rate, and the table."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_not_empty("mixers", self.mixers)
        for rate in self.learning_rates:
            check_positive("learning_rates", rate)
