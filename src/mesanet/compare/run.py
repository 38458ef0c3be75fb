"""A comparison from its config to its report."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mesanet.compare.corpus import describe_corpus
from mesanet.compare.plan import evaluation, make_plan, run_config
from mesanet.compare.sample import write_sample
from mesanet.config.compare import CompareConfig
from mesanet.config.evaluation import EvaluationConfig, SolverOverride
from mesanet.config.training import RunConfig
from mesanet.data.dataset import Dataset
from mesanet.errors import UserError
from mesanet.evaluation.run import current_weights, evaluate_run
from mesanet.io import read_json, read_record, write_json_atomic
from mesanet.presets import pattern
from mesanet.report.comparison import CORPUS, EVALUATED, RUNS, preconditioner
from mesanet.report.page import build_report
from mesanet.report.shapes import CORPUS as CORPUS_SHAPE
from mesanet.training.distributed import Processes, connect
from mesanet.training.presets import mixer_patterns
from mesanet.training.run import check_data, prepared, train
from mesanet.training.told import same_for_all


def compare(config: CompareConfig, *, command: Sequence[str] | None = None, quiet: bool = False) -> Path:
    """Train every mixer, evaluate it, and write the report; what has its record already is not done again.

    Every process that torchrun started has to call this with the same arguments: they share the training, and the
    first one does everything else.
    """
    with same_for_all():
        config = replace(config, mixers=mixer_patterns(config.mixers))
        # All of them, so that a mistake in the last one is not met after a night of training the others.
        first, *_ = [run_config(config, mixers) for mixers in config.mixers]
        _check_processes(first)
    words = list(command) if command is not None else None
    with connect(first.training) as processes:
        quiet = quiet or not processes.first
        dataset = prepared(first, processes, quiet=quiet)
        runs = {mixers: run_config(config, mixers, dataset.vocabulary) for mixers in config.mixers}
        first = runs[config.mixers[0]]
        plan = processes.from_first(lambda: _begin(config, first, dataset, words, processes))
        for number, mixers in enumerate(config.mixers, start=1):
            started = time.monotonic()
            _say(f"[{number}/{len(config.mixers)}] {mixers}", quiet)
            train(runs[mixers], config.out / RUNS / mixers, resume=True, quiet=quiet)
            stage = _Evaluation(config, plan, mixers, dataset, str(processes.device), words, quiet)
            page = processes.from_first(stage.run)
            _say(f"[{number}/{len(config.mixers)}] {mixers}: {time.monotonic() - started:.0f} s; {page}", quiet)
    return page


@dataclass(frozen=True)
class _Evaluation:
    """What follows the training of one mixer."""

    config: CompareConfig
    plan: dict[str, Any]
    mixers: str
    dataset: Dataset
    device: str
    command: Sequence[str] | None
    quiet: bool

    def run(self) -> Path:
        """Evaluate, let it write, and draw the report with it."""
        config, folder = self.config, self.config.out / RUNS / self.mixers
        _write_once(folder / EVALUATED, {"weights_sha256": current_weights(folder)})
        position, extrapolation, solver = (
            evaluation(self.plan, name) for name in ("position", "extrapolation", "solver")
        )
        self._evaluate([each for each in (position, extrapolation) if each is not None])
        if solver is not None and "mesa" in pattern(self.mixers):
            fixed = [
                SolverOverride(max_steps=steps, tolerance=0.0, preconditioner=preconditioner(0.0))
                for steps in config.solver_steps
            ]
            adaptive = [SolverOverride(tolerance=tolerance) for tolerance in config.solver_tolerances]
            self._evaluate([solver], [*fixed, *adaptive])
        write_sample(folder, self.dataset, config, self.device, self.command)
        return build_report(config.out)

    def _evaluate(
        self, configs: list[EvaluationConfig], solvers: Sequence[SolverOverride] = (SolverOverride(),)
    ) -> None:
        folder = self.config.out / RUNS / self.mixers
        evaluate_run(folder, configs, solvers, device=self.device, command=self.command, quiet=self.quiet)


def _begin(
    config: CompareConfig, first: RunConfig, dataset: Dataset, command: list[str] | None, processes: Processes
) -> dict[str, Any]:
    """Write down what is going to be done, and on which data, once it is clear that these data allow it."""
    check_data(first, dataset, processes)
    if len(dataset.validation) == 0:
        raise UserError(
            f"{dataset.folder} has no held-out text to evaluate on: prepare it again into another folder, with a "
            "larger --validation-fraction"
        )
    plan = make_plan(config, first, dataset, command, processes.count)
    _corpus(config.out / CORPUS, dataset)
    return plan


def _check_processes(config: RunConfig) -> None:
    """Refuse several processes that nobody told how to share the work."""
    count = os.environ.get("WORLD_SIZE", "1")
    if count != "1" and config.training.parallel == "none":
        raise UserError(f"there are {count} processes: let them share the work with --parallel ddp or --parallel fsdp")


def _corpus(path: Path, dataset: Dataset) -> None:
    if not path.exists() or read_record(path, CORPUS_SHAPE)["fingerprint"] != dataset.fingerprint:
        write_json_atomic(path, describe_corpus(dataset))


def _write_once(path: Path, value: dict[str, Any]) -> None:
    """Write a record, unless it is there already."""
    if not path.exists() or read_json(path) != value:
        write_json_atomic(path, value)


def _say(text: str, quiet: bool) -> None:
    if not quiet:
        print(text, file=sys.stderr, flush=True)
