"""Training with every learning rate of a grid, and the table that says which was best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from mesanet.config.sweep import SweepConfig
from mesanet.config.training import RunConfig
from mesanet.errors import UserError
from mesanet.io import Shape, read_record, write_json_atomic, write_text_atomic
from mesanet.training.diagnosis import NonFiniteError
from mesanet.training.distributed import Processes, connect
from mesanet.training.presets import GRIDS, mixer_patterns
from mesanet.training.run import prepared, train
from mesanet.training.run_folder import RUN_CONFIG_FILE, check_same
from mesanet.training.told import same_for_all

LONG_RUN = 30 * 10**9
"""Tokens from which a run takes the paper's grid for 50 billion tokens rather than that for 15."""


TABLE = "sweep.json"
TRIALS: Shape = [{"mixers": str, "learning_rate": float, "loss": (None, float), "out": str}]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a sweep."""

    mixers: str
    """The pattern of mixers."""
    learning_rate: float
    """The peak learning rate."""
    loss: float | None
    """Loss on held-out text at the end, or on the last batch where there is no such text; None where it diverged."""
    out: str
    """The run folder, within the sweep's."""


def sweep(config: SweepConfig, base: Callable[[str], RunConfig], *, quiet: bool = False) -> list[Trial]:
    """Train `base(mixers)` with each mixer and rate; what an earlier call has finished or begun is taken up.

    Returns all that the table holds: what earlier calls with other mixers or rates have found stays in it.
    """
    with same_for_all():
        runs = {
            (name, rate): with_rate(base(name), rate)
            for name in mixer_patterns(config.mixers)
            for rate in config.learning_rates or grid(base(name))
        }
    first = next(iter(runs.values()))
    with connect(first.training) as processes:
        data = prepared(first, processes, quiet=quiet)
        trials = processes.from_first(lambda: earlier_trials(config.out, base, data.fingerprint))
        for (name, rate), run in runs.items():
            trials[name, rate] = trial(config, name, rate, run, processes, quiet=quiet)
            processes.from_first(lambda: write_table(config.out, list(trials.values())))
    return list(trials.values())


def earlier_trials(out: Path, base: Callable[[str], RunConfig], data: str) -> dict[tuple[str, float], Trial]:
    """What earlier calls have left in the folder, by mixers and rate, or a UserError where they had other settings."""
    path = out / TABLE
    if not path.exists():
        return {}
    trials = [Trial(**{part.name: found[part.name] for part in fields(Trial)}) for found in read_record(path, TRIALS)]
    # A run whose folder somebody has removed is to be made anew, if it is asked for.
    trials = [each for each in trials if (out / each.out / RUN_CONFIG_FILE).exists()]
    for each in trials:
        check_same(out / each.out, with_rate(base(each.mixers), each.learning_rate), data)
    return {(each.mixers, each.learning_rate): each for each in trials}


def trial(config: SweepConfig, name: str, rate: float, run: RunConfig, processes: Processes, *, quiet: bool) -> Trial:
    """Train once, or take what is there; a run that became infinite counts as one that diverged."""
    folder = config.out / name / rate_name(rate)
    loss: float | None = None
    if processes.from_first(lambda: has_diverged(folder)):
        data = prepared(run, processes, quiet=quiet)
        processes.from_first(lambda: check_same(folder, run, data.fingerprint))
    else:
        try:
            result = train(run, folder, resume=True, quiet=quiet)
        except NonFiniteError:
            loss = None
        else:
            loss = result.loss if result.validation_loss is None else result.validation_loss
    return Trial(mixers=name, learning_rate=rate, loss=loss, out=folder.relative_to(config.out).as_posix())


def has_diverged(folder: Path) -> bool:
    """Whether an earlier call ended in a dump, which the same run would end in again."""
    return any(folder.glob("dump_step_*/report.json"))


def rate_name(rate: float) -> str:
    """A rate in words that no other rate has."""
    return repr(float(rate))


def grid(run: RunConfig) -> tuple[float, ...]:
    """The rates that the paper scanned for runs of about this length."""
    return GRIDS[50 if run.steps * run.tokens_per_step >= LONG_RUN else 15]


def with_rate(run: RunConfig, rate: float) -> RunConfig:
    """The same run with another peak learning rate."""
    return replace(run, training=replace(run.training, peak_learning_rate=rate))


def write_table(out: Path, trials: Sequence[Trial]) -> None:
    """Write the trials as JSON and as a Markdown table."""
    write_json_atomic(out / TABLE, [vars(trial) for trial in trials])
    write_text_atomic(out / "sweep.md", table(trials) + "\n")


def table(trials: Sequence[Trial]) -> str:
    """A Markdown table: a row for each mixer, a column for each rate, the best of a row in bold."""
    if not trials:
        raise UserError("the sweep has no runs; name a mixer with --mixers")
    rates = sorted({trial.learning_rate for trial in trials})
    losses = {(trial.mixers, trial.learning_rate): trial.loss for trial in trials}
    lines = ["| mixer | " + " | ".join(map(rate_name, rates)) + " |", "|---|" + "---:|" * len(rates)]
    for name in dict.fromkeys(trial.mixers for trial in trials):
        best = min((trial.loss for trial in trials if trial.mixers == name and trial.loss is not None), default=None)
        cells = [cell(losses[name, rate], best) if (name, rate) in losses else "" for rate in rates]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(loss: float | None, best: float | None) -> str:
    """One loss of the table."""
    if loss is None:
        return "diverged"
    return f"**{loss:.4f}**" if loss == best else f"{loss:.4f}"
