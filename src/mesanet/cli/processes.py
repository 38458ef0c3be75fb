"""Commands that torchrun starts several times: one of the processes speaks for all."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from mesanet.cli.dispatch import INTERRUPTED, USER_MISTAKE, is_mistake


def is_first() -> bool:
    """Whether this is the only process, or the first of several."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def only_first_speaks() -> Iterator[None]:
    """End the other processes with the right code and no words where the first one reports a mistake."""
    try:
        yield
    except Exception as error:
        if is_first() or not is_mistake(error):
            raise
        sys.exit(USER_MISTAKE)
    except KeyboardInterrupt:
        if is_first():
            raise
        sys.exit(INTERRUPTED)
