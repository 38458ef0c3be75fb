"""The precision in which a rule computes is its own: no switch of the caller's reaches inside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch

EXACT = ("ieee", "none")
"""The settings under which products of float32 matrices are float32; "none" leaves it to the default, the same."""


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
        self._before: list[tuple[Any, str]] = []

    def enter(self) -> None:
        """Note and switch off what is on."""
        with self._lock:
            if self._inside == 0:
                self._before = [(switch, _get(switch)) for switch in _switches() if _get(switch) not in EXACT]
                for switch, _ in self._before:
                    _set(switch, "ieee")
            self._inside += 1

    def leave(self) -> None:
        """Put back what was noted."""
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                for switch, before in self._before:
                    _restore(switch, before)


def _switches() -> tuple[Any, ...]:
    cpu: Any = torch.backends.mkldnn
    return (torch.backends.cuda.matmul, cpu.matmul) if _BY_NAME else (torch.backends.cuda.matmul,)


def _get(switch: Any) -> str:
    if _BY_NAME:
        return str(switch.fp32_precision)
    return "tf32" if switch.allow_tf32 else "ieee"


def _set(switch: Any, value: str) -> None:
    if _BY_NAME:
        switch.fp32_precision = value
    else:
        switch.allow_tf32 = value != "ieee"


def _restore(switch: Any, value: str) -> None:
    # A setting that was inherited from the one for all backends has to go on being so.
    if _BY_NAME:
        _set(switch, "none")
    if _get(switch) != value:
        _set(switch, value)


# PyTorch 2.9 gave every backend a setting of its own, and refuses to read the old one where the two were mixed.
_BY_NAME = hasattr(torch.backends, "fp32_precision")
_PRODUCTS = _FullProducts()
