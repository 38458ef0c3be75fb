"""What a comparison will do, written down before it begins, so that it goes on with the same after a kill."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mesanet.config.base import from_dict, to_dict
from mesanet.config.compare import CompareConfig
from mesanet.config.evaluation import EvaluationConfig
from mesanet.config.training import RunConfig
from mesanet.data.dataset import Dataset
from mesanet.errors import UserError
from mesanet.evaluation.documents import lengths
from mesanet.evaluation.run import provenance
from mesanet.io import read_record, write_json_atomic
from mesanet.processor import processor
from mesanet.report.comparison import PLAN
from mesanet.report.shapes import PLAN as PLAN_SHAPE
from mesanet.training.presets import run_preset

FREE = ("mixers", "out", "parallel", "accumulation", "activation_checkpointing", "device")
"""What may change when a comparison goes on: there can be more mixers, the folder may have been moved, and the same
can be computed in another way."""
OVERRIDES = ("precision", "parallel", "accumulation", "activation_checkpointing", "device")
"""Settings of training that a comparison may give."""
FEWEST = 4
"""Documents that have to be long enough for length extrapolation."""


def run_config(config: CompareConfig, mixers: str, vocabulary: int | None = None) -> RunConfig:
    """The training run of one mixer: the preset's, but for the data and the steps that the comparison names.

    With data of its own the comparison takes the `vocabulary` of these.
    """
    run = run_preset(config.preset, mixers)
    if config.data is not None:
        run = replace(run, data=replace(run.data, path=config.data), prepare=None)
        if vocabulary is not None:
            run = replace(run, model=replace(run.model, vocabulary=vocabulary))
    given = {name: getattr(config, name) for name in OVERRIDES if getattr(config, name) is not None}
    run = replace(run, training=replace(run.training, **given))
    if config.steps is not None:
        warmup = min(run.training.warmup_steps, config.steps // 10)
        run = replace(run, training=replace(run.training, steps=config.steps, tokens=None, warmup_steps=warmup))
    return run


def make_plan(
    config: CompareConfig, run: RunConfig, dataset: Dataset, command: list[str] | None, processes: int = 1
) -> dict[str, Any]:
    """Settle everything, write it into the folder, or refuse a folder that holds another comparison."""
    path = config.out / PLAN
    made = provenance("comparison", command)
    about = {**{name: made[name] for name in ("created", "command", "mesanet", "torch")}, "machine": machine(processes)}
    plan = {
        **made,
        "preset": config.preset,
        "mixers": list(config.mixers),
        "length": run.data.sequence_length,
        "machine": about["machine"],
        "history": [about],
        "settings": to_dict(config),
        "run": to_dict(run),
        "data": dataset.fingerprint,
        "evaluations": _evaluations(config, run, dataset),
    }
    if path.exists():
        before = read_record(path, PLAN_SHAPE)
        _check_same(before, plan, config)
        plan["created"] = before["created"]
        plan["history"] = _history(before["history"], about)
        # A comparison that goes on with some of its mixers keeps the others in its report.
        plan["mixers"] = [*dict.fromkeys([*before["mixers"], *plan["mixers"]])]
    write_json_atomic(path, plan)
    return plan


def evaluation(plan: dict[str, Any], name: str) -> EvaluationConfig | None:
    """One of the planned evaluations, or None where the data do not allow it."""
    found = plan["evaluations"][name]
    return None if found is None else from_dict(EvaluationConfig, found)


def _evaluations(config: CompareConfig, run: RunConfig, dataset: Dataset) -> dict[str, Any]:
    length = run.data.sequence_length
    base = EvaluationConfig(data=run.data.path, length=length, piece=max(2048, length))
    longest, extrapolation = _longest(config, length, dataset), None
    if longest > length:
        extrapolation = replace(base, length=longest, at_least=longest, whole=True, max_tokens=config.longest_tokens)
    return {
        "position": to_dict(replace(base, max_tokens=config.tokens)),
        "extrapolation": None if extrapolation is None else to_dict(extrapolation),
        "solver": to_dict(replace(base, max_tokens=config.solver_tokens)),
    }


def _longest(config: CompareConfig, length: int, dataset: Dataset) -> int:
    """The greatest multiple of the training length by a power of two that a few held-out documents reach."""
    sizes = np.sort(lengths(dataset.validation))
    reached = int(sizes[-FEWEST]) if len(sizes) >= FEWEST else 0
    multiple = 1
    while multiple * 2 <= config.longest and multiple * 2 * length <= min(reached, config.longest_tokens):
        multiple *= 2
    return multiple * length


def _history(before: list[dict[str, Any]], now: dict[str, Any]) -> list[dict[str, Any]]:
    """Which commands made it, where and with which versions, each once."""
    told = [{**each, "created": None} for each in before]
    return before if {**now, "created": None} in told else [*before, now]


def _check_same(before: dict[str, Any], plan: dict[str, Any], config: CompareConfig) -> None:
    for name, value in plan["settings"].items():
        there = before["settings"].get(name)
        if name not in FREE and there != value:
            raise UserError(
                f"{config.out} holds another comparison: {name} is {there!r} there and {value!r} here; "
                "choose another folder with --out, or the same settings"
            )
    if before["data"] != plan["data"]:
        raise UserError(f"{config.out} was begun with other data; restore them, or choose another folder with --out")


def machine(processes: int = 1) -> str:
    """The processor or GPU, in words."""
    several = f"{processes} x " if processes > 1 else ""
    if torch.cuda.is_available():
        return several + torch.cuda.get_device_name()
    return f"{several}{processor()}, {torch.get_num_threads()} threads"
