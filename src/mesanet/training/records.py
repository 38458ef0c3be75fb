"""Where a run's measurements go: the metrics file, and TensorBoard if it is asked for."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from mesanet.optional import import_optional
from mesanet.training.distributed import Processes
from mesanet.training.metrics import METRICS_FILE, MetricsFile, read_metrics, truncate_metrics

BOARD = "tensorboard"
SHOWN = {
    "train": ("loss", "learning_rate", "gradient_norm", "tokens_per_second"),
    "validation": ("loss", "perplexity"),
}


class Records:
    """Takes the measurements after `step`, and lets the first process write them down.

    The other processes go on meanwhile: what goes wrong with writing ends the run in all of them at the next `sync`.
    """

    def __init__(self, run: Path, step: int, processes: Processes, *, tensorboard: bool) -> None:
        self._run, self._step, self._processes, self._tensorboard = run, step, processes, tensorboard
        self._file: MetricsFile | None = None
        self._board: Any = None
        self._validated: set[int] = set()
        self._failure: Exception | None = None
        processes.from_first(self._open)

    def _open(self) -> None:
        if self._tensorboard:
            import_optional("tensorboard", "tensorboard")
        path = self._run / METRICS_FILE
        truncate_metrics(path, self._step)
        self._validated = {record["step"] for record in read_metrics(path) if record["kind"] == "validation"}
        self._file = MetricsFile(path)
        if self._tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(self._run / BOARD, purge_step=self._step + 1)

    def __enter__(self) -> Records:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.__exit__(kind, error, trace)
        if self._board is not None:
            self._board.close()

    @property
    def failed(self) -> bool:
        """Whether writing has failed in this process, which `sync` is going to tell."""
        return self._failure is not None

    def validated(self, step: int) -> bool:
        """Whether there is a validation of this step."""
        return step in self._validated

    def write(self, record: dict[str, Any]) -> None:
        """Note one measurement."""
        if self._file is None or self.failed:
            return
        try:
            self._file.write(record)
            if self._board is not None:
                for name in SHOWN[record["kind"]]:
                    self._board.add_scalar(f"{record['kind']}/{name}", record[name], record["step"])
        except Exception as error:  # noqa: BLE001 - whatever went wrong, the others have to hear of it
            self._failure = error
        if record["kind"] == "validation":
            self._validated.add(record["step"])

    def sync(self) -> None:
        """Bring all of it to the disk, or raise what has gone wrong with writing it; every process has to call this."""
        self._processes.from_first(self._sync)

    def _sync(self) -> None:
        if self._failure is not None:
            raise self._failure
        assert self._file is not None
        self._file.sync()
