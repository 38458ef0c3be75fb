"""Checks that a config's `__post_init__` calls, and the error that they raise."""

from __future__ import annotations

import math
from collections.abc import Collection, Sized


class ConfigError(ValueError):
    """A field with a bad value; its text reads as in `model.width: got -3, expected a positive number`."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        """Dotted name of the field."""
        self.problem = problem
        """What came and what is accepted."""

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, str]]:
        """Let the error travel between processes, which data loading and sweeps use."""
        return ConfigError, (self.field, self.problem)


def check_positive(field: str, value: float) -> None:
    """Refuse anything but a finite number above zero."""
    if not 0 < value < math.inf:
        raise ConfigError(field, f"got {value!r}, expected a positive number")


def check_in_range(
    field: str,
    value: float,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    low_open: bool = False,
    high_open: bool = False,
) -> None:
    """Refuse a number outside [low, high]; `low_open` and `high_open` exclude that end. NaN is always outside."""
    above = value > low if low_open else value >= low
    below = value < high if high_open else value <= high
    if not (above and below):
        left, right = ("(" if low_open else "["), (")" if high_open else "]")
        raise ConfigError(field, f"got {value!r}, expected a number in {left}{low!r}, {high!r}{right}")


def check_one_of(field: str, value: object, accepted: Collection[object]) -> None:
    """Refuse a value that is not among `accepted`."""
    if value not in accepted:
        raise ConfigError(field, f"got {value!r}, expected one of {', '.join(map(repr, accepted))}")


def check_not_empty(field: str, value: Sized) -> None:
    """Refuse an empty string or tuple."""
    if len(value) == 0:
        raise ConfigError(field, f"got {value!r}, expected at least one item")
