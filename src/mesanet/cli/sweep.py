"""`mesanet sweep PRESET`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated

from tyro.conf import Positional, arg

from mesanet.cli.dispatch import parse, scan
from mesanet.cli.processes import is_first, only_first_speaks
from mesanet.cli.train import EXAMPLE
from mesanet.config.data import DataConfig
from mesanet.config.model import ModelConfig
from mesanet.config.sweep import SweepConfig
from mesanet.config.training import RunConfig, TrainingConfig, with_length
from mesanet.errors import UserError


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
        given = scan(Options, arguments, program="mesanet sweep")
        base, default = None, Options()
        if given.preset:
            from mesanet.training.presets import run_preset

            base = with_length(run_preset(given.preset), steps=given.training.steps, tokens=given.training.tokens)
            default = Options(model=base.model, data=base.data, training=base.training)
        options = parse(Options, arguments, default=default, program="mesanet sweep")
        if base is None:
            raise UserError("name a preset, such as demo, before any list of mixers or rates; --help shows all options")
        prepare = base.prepare
        from mesanet.training.presets import known_mixers, pattern
        from mesanet.training.sweep import sweep, table

        def run_of(mixers: str) -> RunConfig:
            model = replace(options.model, mixers=known_mixers(pattern(mixers)))
            return RunConfig(model=model, data=options.data, training=options.training, prepare=prepare)

        trials = sweep(options, run_of)
    if is_first():
        print(table(trials))
