"""Mistakes that all processes of a run meet, so that the first one speaks for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

AnyError = TypeVar("AnyError", bound=BaseException)
MARK = "_told_by_the_first_process"


def told(error: AnyError) -> AnyError:
    """The error, marked as one that the first process meets and reports, too."""
    setattr(error, MARK, True)
    return error


def is_told(error: BaseException) -> bool:
    """Whether the first process reports this."""
    return bool(getattr(error, MARK, False))


@contextmanager
def same_for_all() -> Iterator[None]:
    """Work that depends on the words of the command alone: a bad value in it is met by every process.

    A file is no such thing: it may be missing on one host and present on another.
    """
    try:
        yield
    except ValueError as error:
        told(error)
        raise
