"""The precision in which a rule computes is its own: no switch of the caller's reaches inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch


@contextmanager
def own_precision(device: torch.device) -> Iterator[None]:
    """A context in which neither autocast nor TensorFloat-32 (or bfloat16 on a CPU) rounds what a product takes.

    Ten bits of mantissa are fewer than a solver needs that promises a residual of 1e-4.
    """
    with torch.autocast(device.type, enabled=False):
        _PRODUCTS.enter()
        try:
            yield
        finally:
            _PRODUCTS.leave()


class _FullProducts:
    """Float32 products of matrices in float32 while at least one thread is inside.

    The switch belongs to the whole process, and a backward pass has a thread for each device: only the first to enter
    sets it, and only the last to leave sets it back.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._inside = 0
        self._restore: Callable[[], None] | None = None

    def enter(self) -> None:
        """Switch off what is on."""
        with self._lock:
            if self._inside == 0:
                self._restore = _switch_off()
            self._inside += 1

    def leave(self) -> None:
        """Switch it on again."""
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._restore is not None:
                self._restore()


def _switch_off() -> Callable[[], None] | None:
    """Make products of float32 matrices float32; returns how to undo it, or None if they were."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:
        # Since PyTorch 2.9 every backend has a setting of its own too, and it refuses to read the old one for all of
        # them where they differ.
        return _switch_off_by_backend()
    if before == "highest":
        return None
    torch.set_float32_matmul_precision("highest")
    return lambda: torch.set_float32_matmul_precision(before)


def _switch_off_by_backend() -> Callable[[], None]:
    cpu: Any = torch.backends.mkldnn
    switches = [(switch, str(switch.fp32_precision)) for switch in (torch.backends.cuda.matmul, cpu.matmul)]
    changed = [(switch, before) for switch, before in switches if before not in ("ieee", "none")]
    for switch, _ in changed:
        switch.fp32_precision = "ieee"

    def restore() -> None:
        for switch, before in changed:
            # A setting that was inherited from the one for all backends has to go on being so.
            switch.fp32_precision = "none"
            if switch.fp32_precision != before:
                switch.fp32_precision = before

    return restore


_PRODUCTS = _FullProducts()
