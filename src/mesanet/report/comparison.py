"""What `mesanet compare` has written, read back for its report."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from mesanet.errors import UserError
from mesanet.io import read_json_lines, read_record
from mesanet.report import shapes
from mesanet.report.evaluations import Record, newest, overridden, read_evaluations
from mesanet.report.style import mixer_colours

PLAN = "compare.json"
CORPUS = "corpus.json"
RUNS = "runs"
SAMPLE = "sample.json"
EVALUATED = "evaluated.json"
"""Which weights of a run the comparison has evaluated."""
METRICS = "metrics.jsonl"
BASE = "attention"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One trained model and all that is known about it."""

    mixers: str
    """Its mixer, or its pattern of mixers."""
    config: Record
    """The run's config.json."""
    training: list[Record]
    """Records of updates."""
    validation: list[Record]
    """Records of validations."""
    position: Record | None
    """The evaluation at the training length."""
    extrapolation: Record | None
    """The evaluation at the longest length."""
    solver: list[Record]
    """Evaluations with other settings of the solver."""
    sample: Record | None
    """Generated text."""

    @property
    def learning_rate(self) -> float:
        """The peak learning rate that it was trained with."""
        return float(self.config["training"]["peak_learning_rate"])

    @property
    def tokens_per_second(self) -> float | None:
        """The median over training, without the first steps, in which everything is loaded for the first time."""
        rates = [record["tokens_per_second"] for record in self.training]
        return float(np.median(rates[min(3, len(rates) - 1) :])) if rates else None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything in a folder of `mesanet compare`."""

    folder: Path
    """Where it is."""
    plan: Record
    """What was asked for."""
    corpus: Record | None
    """About the data."""
    runs: list[Run]
    """The models, in the order asked for, as far as they have come."""

    @property
    def base(self) -> Run | None:
        """The attention model, to which the others are compared."""
        return next((run for run in self.runs if run.mixers == BASE), None)

    @cached_property
    def colours(self) -> dict[str, str]:
        """The colour of each model."""
        return mixer_colours([run.mixers for run in self.runs])

    @property
    def length(self) -> int:
        """The training length."""
        return int(self.plan["length"])


def read_comparison(folder: Path) -> Comparison:
    """Read the records; runs that have not begun are left out."""
    if not (folder / PLAN).is_file():
        raise UserError(f"{folder} holds no comparison: there is no {PLAN} in it; `mesanet compare` writes one")
    plan = read_record(folder / PLAN, shapes.PLAN)
    corpus = read_record(folder / CORPUS, shapes.CORPUS) if (folder / CORPUS).is_file() else None
    found = [_read_run(folder / RUNS / mixers, mixers, plan) for mixers in plan["mixers"]]
    runs = [run for run in found if run is not None]
    if not runs:
        raise UserError(
            f"{folder} has no model yet: none of its runs has begun; run the same `mesanet compare` to go on"
        )
    return Comparison(folder=folder, plan=plan, corpus=corpus, runs=runs)


def _read_run(folder: Path, mixers: str, plan: Record) -> Run | None:
    if not (folder / "config.json").is_file():
        return None
    metrics = list(read_json_lines(folder / METRICS, shapes.METRIC))
    records = _current(list(read_evaluations(folder)), folder)
    position, extrapolation, solver = (
        _planned(records, plan["evaluations"][name], plan["data"]) for name in ("position", "extrapolation", "solver")
    )
    return Run(
        mixers=mixers,
        config=read_record(folder / "config.json", shapes.RUN_CONFIG),
        training=[record for record in metrics if record["kind"] == "train"],
        validation=[record for record in metrics if record["kind"] == "validation"],
        position=newest(record for record in position if not overridden(record)),
        extrapolation=newest(record for record in extrapolation if not overridden(record)),
        solver=_solver_settings(solver),
        sample=read_record(folder / SAMPLE, shapes.SAMPLE) if (folder / SAMPLE).is_file() else None,
    )


def _current(records: list[Record], folder: Path) -> list[Record]:
    """The records of the weights that the comparison has evaluated; of the newest ones, as long as it has not said."""
    facts = folder / EVALUATED
    latest = newest(iter(records))
    if latest is None:
        return []
    weights = (
        read_record(facts, shapes.EVALUATED)["weights_sha256"] if facts.is_file() else latest["model"]["weights_sha256"]
    )
    return [record for record in records if record["model"]["weights_sha256"] == weights]


def _planned(records: list[Record], settings: Record | None, data: str) -> list[Record]:
    """The records of one planned evaluation: of these data, with all of these settings, wherever the data lie."""
    if settings is None:
        return []
    wanted = {name: value for name, value in settings.items() if name != "data"}
    return [
        record
        for record in records
        if record["data"]["fingerprint"] == f"{data}/{settings['split']}"
        and all(record["settings"].get(name) == value for name, value in wanted.items())
    ]


def _solver_settings(records: list[Record]) -> list[Record]:
    """The newest record of each number of plain steps, and of each tolerance with the model's own method."""
    settings: dict[tuple[int | None, float | None], list[Record]] = {}
    for record in records:
        override = record["override"]
        if overridden(record) and override["preconditioner"] == preconditioner(override["tolerance"]):
            settings.setdefault((override["max_steps"], override["tolerance"]), []).append(record)
    found = (newest(iter(same)) for same in settings.values())
    return [record for record in found if record is not None]


def preconditioner(tolerance: float | None) -> Literal["none"] | None:
    """What the solver is told beside a tolerance: 0 means fixed steps, which the paper takes without one."""
    return "none" if tolerance == 0 else None
