"""Evaluation of a run folder: load its model, evaluate, and leave a record in `RUN/evaluations`."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mesanet import __version__
from mesanet.config.base import to_dict, to_json
from mesanet.config.evaluation import EvaluationConfig, SolverOverride
from mesanet.data.progress import Progress
from mesanet.errors import UserError
from mesanet.evaluation.documents import EvaluationData, ModelTokenizer, open_data
from mesanet.evaluation.evaluate import evaluate
from mesanet.io import file_digest, read_record, write_json_atomic
from mesanet.model.backbone import LanguageModel
from mesanet.report.shapes import EVALUATION

FOLDER = "evaluations"
FORMAT = 1


class Evaluated(NamedTuple):
    """One evaluation."""

    path: Path
    """Where its record is."""
    record: dict[str, Any]
    """What the file holds."""
    fresh: bool
    """False where the record was there already."""


def evaluate_run(
    run: Path,
    configs: Sequence[EvaluationConfig],
    solvers: Sequence[SolverOverride] = (SolverOverride(),),
    *,
    tokenizer: str | None = None,
    device: str = "cpu",
    again: bool = False,
    command: Sequence[str] | None = None,
    quiet: bool = False,
) -> list[Evaluated]:
    """Evaluate a run's newest model by every config with every solver; what is recorded already is not done again.

    `command` is what the records say made them, by default the words of this process.
    """
    from mesanet.model.files import load_model

    folder = own_model(run)
    model = load_model(folder, device=device)
    about = describe_model(model, folder, run)

    own = _model_tokenizer(tokenizer, run, folder, model.config.vocabulary)
    done = []
    for config in configs:
        data = open_data(config, own)
        for solver in solvers:
            key = evaluation_key(about, data, config, solver)
            path = run / FOLDER / record_name(data, config, solver, key)
            if path.exists() and not again:
                done.append(Evaluated(path, read_record(path, EVALUATION), fresh=False))
                continue
            with Progress(path.stem, "tokens", quiet=quiet) as progress:
                found = evaluate(model, data, config, solver, progress.update)
            record = {**provenance("evaluation", command), "key": key, "model": about, **found}
            write_json_atomic(path, record, indent=None)
            done.append(Evaluated(path, record, fresh=True))
    return done


def current_weights(run: Path) -> str:
    """The hash of the weights of a run's newest model, as records have it."""
    from mesanet.model.files import WEIGHTS_FILE

    return file_digest(own_model(run) / WEIGHTS_FILE)


def own_model(run: Path) -> Path:
    """Where a run's newest model is; a folder of runs, as of a comparison, is refused with their names."""
    from mesanet.model.files import FINISHED, find_model

    parts = (FINISHED, "checkpoints")
    if not any((run / part).is_dir() for part in parts):
        inside = sorted({path.parent for part in parts for path in run.glob(f"**/{part}") if path.is_dir()})
        if inside:
            names = ", ".join(map(str, inside))
            raise UserError(f"{run} is no run but holds {len(inside)}: name the one that is meant, of {names}")
    return find_model(run)


def _model_tokenizer(given: str | None, run: Path, folder: Path, vocabulary: int) -> ModelTokenizer:
    from mesanet.model.files import tokenizer_name

    def name() -> str:
        return given or tokenizer_name(run, folder, vocabulary)

    try:
        name()
    except ValueError:
        return ModelTokenizer(name, told=False)
    return ModelTokenizer(name, told=True)


def provenance(kind: str, command: Sequence[str] | None = None) -> dict[str, Any]:
    """What every record says of how it came about."""
    return {
        "kind": kind,
        "format": FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(command) if command is not None else [Path(sys.argv[0]).name, *sys.argv[1:]],
        "mesanet": __version__,
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
    }


def describe_model(model: LanguageModel, folder: Path, run: Path) -> dict[str, Any]:
    """Which model it is, and the hashes of its config and of its weights."""
    from mesanet.model.files import WEIGHTS_FILE

    inside = folder.resolve().relative_to(run.resolve()) if folder.resolve() != run.resolve() else Path()
    return {
        "folder": inside.as_posix(),
        "mixers": list(model.config.mixers),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "config_sha256": hashlib.sha256(to_json(model.config).encode()).hexdigest(),
        "weights_sha256": file_digest(folder / WEIGHTS_FILE),
        "device": str(model.embedding.weight.device),
    }


def evaluation_key(
    about: dict[str, Any], data: EvaluationData, config: EvaluationConfig, solver: SolverOverride
) -> str:
    """A hash of all that decides the result: the weights, the tokens, and the settings."""
    told_by_data = ("data", "split", "text_column", "separator")
    settings = {name: value for name, value in to_dict(config).items() if name not in told_by_data}
    parts = [about["config_sha256"], about["weights_sha256"], data.fingerprint, settings, to_dict(solver)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def record_name(data: EvaluationData, config: EvaluationConfig, solver: SolverOverride, key: str) -> str:
    """A file name that people can read, made unique by the key."""
    parts = [data.name, str(config.length), *(["packed"] if config.packed else [])]
    if solver.max_steps is not None:
        parts.append(f"steps{solver.max_steps}")
    if solver.tolerance is not None:
        parts.append(f"tolerance{solver.tolerance:g}")
    if solver.preconditioner is not None:
        parts.append(f"preconditioner_{solver.preconditioner}")
    return "-".join([*parts, key[:8]]) + ".json"
