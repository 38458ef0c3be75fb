"""What a run has measured: one JSON object per line, in the order of the steps."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from mesanet.errors import UserError
from mesanet.io import read_json_lines, write_bytes_atomic
from mesanet.report.shapes import METRIC

METRICS_FILE = "metrics.jsonl"


class MetricsFile:
    """Appends lines, each on its way to the operating system before the next step begins."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, record: dict[str, Any]) -> None:
        """Append one line."""
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        written = self._file.write(line)
        while written < len(line):
            # A disk that is nearly full takes a part; trying to write the rest says that it is full.
            written += self._file.write(line[written:])

    def sync(self) -> None:
        """Bring all lines to the disk, as a checkpoint that follows them is."""
        os.fsync(self._file.fileno())


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics file, but for a last line that a crash has cut off; a UserError names a damaged one."""
    return read_json_lines(path, METRIC)


def truncate_metrics(path: Path, step: int) -> None:
    """Drop what was measured after `step`, so that no line stands twice once training goes on from there.

    Lines up to a checkpoint's step are on the disk before it is; what a power cut makes of later ones does not matter.
    """
    if not path.exists():
        return
    kept, reached = [], 0
    try:
        for record in read_metrics(path):
            reached = record["step"]
            if reached <= step:
                kept.append(record)
    except UserError:
        if reached < step:
            raise
    write_bytes_atomic(path, b"".join(json.dumps(record).encode() + b"\n" for record in kept))
