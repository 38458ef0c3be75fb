"""The name of the processor, for records of what was measured where."""

from __future__ import annotations

import platform
from pathlib import Path


def processor() -> str:
    """The model as the operating system calls it (Linux), or else the little that Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
