"""Where a run's measurements go: the metrics file, and TensorBoard if it is asked for."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from mesanet.optional import import_optional
from mesanet.training.metrics import METRICS_FILE, MetricsFile, read_metrics, truncate_metrics

BOARD = "tensorboard"
SHOWN = {
    "train": ("loss", "learning_rate", "gradient_norm", "tokens_per_second"),
    "validation": ("loss", "perplexity"),
}


class Records:
    """Takes the measurements after `step`; in all processes but the first it does nothing."""

    def __init__(self, run: Path, step: int, *, active: bool, tensorboard: bool) -> None:
        self._file: MetricsFile | None = None
        self._board: Any = None
        self._validated: set[int] = set()
        if not active:
            return
        path = run / METRICS_FILE
        truncate_metrics(path, step)
        self._validated = {record["step"] for record in read_metrics(path) if record["kind"] == "validation"}
        self._file = MetricsFile(path)
        if tensorboard:
            import_optional("tensorboard", "tensorboard")
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(run / BOARD, purge_step=step + 1)

    def __enter__(self) -> Records:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.__exit__(kind, error, trace)
        if self._board is not None:
            self._board.close()

    def validated(self, step: int) -> bool:
        """Whether there is a validation of this step."""
        return step in self._validated

    def write(self, record: dict[str, Any]) -> None:
        """Note one measurement."""
        if self._file is None:
            return
        self._file.write(record)
        if record["kind"] == "validation":
            self._validated.add(record["step"])
        if self._board is not None:
            for name in SHOWN[record["kind"]]:
                self._board.add_scalar(f"{record['kind']}/{name}", record[name], record["step"])

    def sync(self) -> None:
        """Bring all of it to the disk."""
        if self._file is not None:
            self._file.sync()
