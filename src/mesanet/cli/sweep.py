"""`mesanet sweep PRESET`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated

from tyro.conf import Positional, arg

from mesanet.cli.dispatch import parse, scan
from mesanet.cli.processes import is_first, only_first_speaks
from mesanet.cli.train import EXAMPLE
from mesanet.config.data import DataConfig, PrepareConfig
from mesanet.config.model import ModelConfig
from mesanet.config.sweep import SweepConfig
from mesanet.config.training import RunConfig, TrainingConfig, with_length
from mesanet.errors import UserError
from mesanet.training.told import same_for_all


@dataclass(frozen=True, kw_only=True)
class Options(SweepConfig):
    """Train with each of the paper's learning rates; the same command again goes on where it was stopped."""

    preset: Positional[Annotated[str, arg(metavar="PRESET")]] = ""
    """demo, laptop, small-15b, small-50b, medium-15b, medium-50b, large-15b or large-50b."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model, but for its mixers."""
    data: DataConfig = EXAMPLE[0]
    """The batches."""
    training: TrainingConfig = EXAMPLE[1]
    """The optimisation, but for its peak learning rate."""


def run(arguments: list[str]) -> None:
    """Train all of them and show the table."""
    with only_first_speaks():
        with same_for_all():
            options, run_of = parse_sweep(arguments)
        from mesanet.training.sweep import sweep, table

        trials = sweep(options, run_of)
    if is_first():
        print(table(trials))


def parse_sweep(arguments: list[str]) -> tuple[Options, Callable[[str], RunConfig]]:
    """The options, and the run of each pattern of mixers that they describe."""
    given = scan(Options, arguments, program="mesanet sweep")
    for value, instead in (
        (given.model.mixers, "name the mixers with --mixers, not with --model.mixers"),
        (given.training.peak_learning_rate, "name the rates with --learning-rates, not with the one of a run"),
    ):
        if value is not None:
            raise UserError(instead)
    base, default = None, Options()
    if given.preset:
        from mesanet.training.presets import run_preset

        length = given.training
        base = with_length(
            run_preset(given.preset), steps=length.steps, tokens=length.tokens, warmup_steps=length.warmup_steps
        )
        default = Options(model=base.model, data=base.data, training=base.training)
    options = parse(Options, arguments, default=default, program="mesanet sweep")
    if base is None:
        raise UserError("name a preset, such as demo, before any list of mixers or rates; --help shows all options")
    return options, partial(run_of, options, base.prepare)


def run_of(options: Options, prepare: PrepareConfig | None, mixers: str) -> RunConfig:
    """The run of one pattern of mixers."""
    from mesanet.training.presets import pattern

    model = replace(options.model, mixers=pattern(mixers))
    return RunConfig(model=model, data=options.data, training=options.training, prepare=prepare)
