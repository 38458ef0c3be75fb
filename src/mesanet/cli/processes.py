"""Commands that torchrun starts several times: one of the processes speaks for all."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from mesanet.cli.dispatch import INTERRUPTED, USER_MISTAKE, in_one_sentence, is_mistake
from mesanet.training.told import is_told


def is_first() -> bool:
    """Whether this is the only process, or the first of several."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"


@contextmanager
def only_first_speaks() -> Iterator[None]:
    """End the other processes with the right code, and without words where the first one has the same to say.

    What one of them alone has met, on a host of its own, it says itself, and which one it is.
    """
    try:
        yield
    except Exception as error:
        if is_first() or not is_mistake(error):
            raise
        if not is_told(error):
            here = f"process {os.environ['RANK']} on {platform.node()}"
            print(f"mesanet: {here}: {in_one_sentence(error)}", file=sys.stderr, flush=True)
        sys.exit(USER_MISTAKE)
    except KeyboardInterrupt:
        if is_first():
            raise
        sys.exit(INTERRUPTED)
