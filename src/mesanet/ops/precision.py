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
    by_backend = [(switch, str(switch.fp32_precision)) for switch in _switches()]
    torch.set_float32_matmul_precision("highest")

    def restore() -> None:
        torch.set_float32_matmul_precision(before)
        # Older switches, such as allow_tf32, set fewer backends than that did.
        _set_back(by_backend)

    return restore


def _switch_off_by_backend() -> Callable[[], None]:
    by_backend = [(switch, str(switch.fp32_precision)) for switch in _switches()]
    changed = [(switch, before) for switch, before in by_backend if before not in ("ieee", "none")]
    for switch, _ in changed:
        switch.fp32_precision = "ieee"
    return lambda: _set_back(changed)


def _switches() -> list[Any]:
    """What holds the settings of single backends, where there are such."""
    switches: list[Any] = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)]
    return [switch for switch in switches if hasattr(switch, "fp32_precision")]


def _set_back(settings: list[tuple[Any, str]]) -> None:
    for switch, before in settings:
        if switch.fp32_precision != before:
            # A setting that was inherited from the one for all backends has to go on being so.
            switch.fp32_precision = "none"
        if switch.fp32_precision != before:
            switch.fp32_precision = before


_PRODUCTS = _FullProducts()
