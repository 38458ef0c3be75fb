"""What `mesanet compare` has written, read back for its report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mesanet.errors import UserError
from mesanet.io import read_json
from mesanet.report.evaluations import Record, overridden, read_evaluations

PLAN = "compare.json"
CORPUS = "corpus.json"
RUNS = "runs"
SAMPLE = "sample.json"
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

    @property
    def length(self) -> int:
        """The training length."""
        return int(self.plan["length"])


def read_comparison(folder: Path) -> Comparison:
    """Read the records; runs that have not begun are left out."""
    if not (folder / PLAN).is_file():
        raise UserError(f"{folder} holds no comparison: there is no {PLAN} in it; `mesanet compare` writes one")
    plan = read_json(folder / PLAN)
    corpus = read_json(folder / CORPUS) if (folder / CORPUS).is_file() else None
    found = [_read_run(folder / RUNS / mixers, mixers, plan) for mixers in plan["mixers"]]
    return Comparison(folder=folder, plan=plan, corpus=corpus, runs=[run for run in found if run is not None])


def _read_run(folder: Path, mixers: str, plan: Record) -> Run | None:
    if not (folder / "config.json").is_file():
        return None
    metrics = list(_metrics(folder / METRICS))
    records = [record for record in read_evaluations(folder) if _current(record, folder)]
    evaluations = plan["evaluations"]
    plain = [record for record in records if not overridden(record)]
    return Run(
        mixers=mixers,
        config=read_json(folder / "config.json"),
        training=[record for record in metrics if record["kind"] == "train"],
        validation=[record for record in metrics if record["kind"] == "validation"],
        position=_matching(plain, evaluations["position"]),
        extrapolation=_matching(plain, evaluations["extrapolation"]),
        solver=[
            record
            for record in records
            if overridden(record) and _matching([record], evaluations["solver"]) is not None
        ],
        sample=read_json(folder / SAMPLE) if (folder / SAMPLE).is_file() else None,
    )


def _current(record: Record, folder: Path) -> bool:
    """Whether a record is of the weights that the run has now, as far as the run says."""
    facts = folder / "evaluated.json"
    return not facts.is_file() or read_json(facts)["weights_sha256"] == record["model"]["weights_sha256"]


def _matching(records: list[Record], settings: Record | None) -> Record | None:
    """The newest record with these settings."""
    if settings is None:
        return None
    names = ("length", "at_least", "whole", "max_tokens", "seed", "split")
    found = [r for r in records if all(r["settings"][name] == settings[name] for name in names)]
    return max(found, key=lambda record: str(record["created"]), default=None)


def _metrics(path: Path) -> Iterator[Record]:
    """The lines of a metrics file, but for a last one that was cut off."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)
