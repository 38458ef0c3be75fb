"""A comparison from its config to its report."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mesanet.compare.corpus import describe_corpus
from mesanet.compare.plan import evaluation, make_plan, run_config
from mesanet.compare.sample import write_sample
from mesanet.config.compare import CompareConfig
from mesanet.config.evaluation import SolverOverride
from mesanet.data.dataset import Dataset
from mesanet.evaluation.run import evaluate_run
from mesanet.io import read_json, write_json_atomic
from mesanet.mixers import mixer_class
from mesanet.presets import pattern
from mesanet.report.comparison import CORPUS, RUNS
from mesanet.report.page import build_report
from mesanet.training.distributed import Processes, choose_device
from mesanet.training.run import prepared, train


def compare(config: CompareConfig, *, command: Sequence[str] | None = None, quiet: bool = False) -> Path:
    """Train every mixer, evaluate it, and write the report; what has its record already is not done again."""
    for mixers in config.mixers:
        for name in pattern(mixers):
            mixer_class(name)
    first = run_config(config, config.mixers[0])
    device = choose_device(first.training.device)
    dataset = prepared(first, Processes(0, 1, device), quiet=quiet)
    words = list(command) if command is not None else None
    plan = make_plan(config, run_config(config, config.mixers[0], dataset.vocabulary), dataset, words)
    _corpus(config.out / CORPUS, dataset)
    for number, mixers in enumerate(config.mixers, start=1):
        started = time.monotonic()
        _say(f"[{number}/{len(config.mixers)}] {mixers}", quiet)
        _one(config, plan, mixers, dataset, str(device), quiet)
        page = build_report(config.out)
        _say(f"[{number}/{len(config.mixers)}] {mixers}: {time.monotonic() - started:.0f} s; {page}", quiet)
    return page


def _one(config: CompareConfig, plan: dict[str, Any], mixers: str, dataset: Dataset, device: str, quiet: bool) -> None:
    """Train and evaluate one mixer."""
    run = run_config(config, mixers, dataset.vocabulary)
    folder = config.out / RUNS / mixers
    model = train(run, folder, resume=True, quiet=quiet).model
    position, extrapolation, solver = (evaluation(plan, name) for name in ("position", "extrapolation", "solver"))
    configs = [each for each in (position, extrapolation) if each is not None]
    evaluate_run(folder, configs, device=device, quiet=quiet)
    if solver is not None and "mesa" in pattern(mixers):
        fixed = [SolverOverride(max_steps=steps, tolerance=0.0) for steps in config.solver_steps]
        adaptive = [SolverOverride(tolerance=tolerance) for tolerance in config.solver_tolerances]
        evaluate_run(folder, [solver], [*fixed, *adaptive], device=device, quiet=quiet)
    write_sample(folder, model, dataset, config, device)


def _corpus(path: Path, dataset: Dataset) -> None:
    if not path.exists() or read_json(path).get("fingerprint") != dataset.fingerprint:
        write_json_atomic(path, describe_corpus(dataset))


def _say(text: str, quiet: bool) -> None:
    if not quiet:
        print(text, file=sys.stderr, flush=True)
