"""`mesanet train PRESET --out RUN`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, Suppress, arg

from mesanet.cli.dispatch import parse, scan
from mesanet.cli.processes import is_first, only_first_speaks
from mesanet.config.base import from_json
from mesanet.config.data import DataConfig, PrepareConfig
from mesanet.config.model import ModelConfig
from mesanet.config.training import RunConfig, TrainingConfig, default_out, with_length
from mesanet.errors import UserError
from mesanet.training.told import same_for_all

EXAMPLE = DataConfig(path=Path("data")), TrainingConfig(steps=10_000)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train a model. Name a preset or a config file; every setting of it can be changed by an option.

    Several processes: `torchrun --nproc-per-node 8 -m mesanet train PRESET --training.parallel fsdp`.
    """

    preset: Positional[Annotated[str, arg(metavar="PRESET")]] = ""
    """demo, laptop, small-15b, small-50b, medium-15b, medium-50b, large-15b or large-50b."""
    config: Path | None = None
    """A config.json as a run folder has it, instead of a preset."""
    mixers: str | None = None
    """Sequence mixers of the preset, mesa if not given: one name, or a pattern such as hawk-mesa."""
    out: Path | None = None
    """The run folder; runs/PRESET-MIXERS if not given."""
    resume: bool = False
    """Go on from the newest checkpoint in the run folder, or begin where there is none."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model, but for its mixers."""
    data: DataConfig = EXAMPLE[0]
    """The batches."""
    training: TrainingConfig = EXAMPLE[1]
    """The optimisation."""
    prepare: Suppress[PrepareConfig | None] = None


def run(arguments: list[str]) -> None:
    """Train, and say where the model is."""
    with only_first_speaks():
        with same_for_all():
            options, config = parse_run(arguments)
        from mesanet.training.run import train

        result = train(config, options.out or default_out(options.preset or "run", config), resume=options.resume)
    if is_first():
        held_out = "" if result.validation_loss is None else f", {result.validation_loss:.4f} on held-out text"
        print(f"{result.model}: {result.steps} steps, loss {result.loss:.4f}{held_out}")


def parse_run(arguments: list[str]) -> tuple[Options, RunConfig]:
    """The options, and the run that they describe."""
    base = base_config(scan(Options, arguments, program="mesanet train"))
    default = Options()
    if base is not None:
        default = Options(model=base.model, data=base.data, training=base.training, prepare=base.prepare)
    options = parse(Options, arguments, default=default, program="mesanet train")
    if base is None:
        raise UserError("name a preset, such as demo, or a config file with --config; --help shows all options")
    return options, RunConfig(
        model=options.model, data=options.data, training=options.training, prepare=options.prepare
    )


def read_run(path: Path) -> RunConfig:
    """The run that a file describes, or a UserError that names the file and what is wrong with it."""
    try:
        return from_json(RunConfig, path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def base_config(given: Any) -> RunConfig | None:
    """The preset or the file that the other options change."""
    from mesanet.training.presets import known_mixers, pattern, run_preset

    if given.model.mixers is not None:
        raise UserError("name the mixers with --mixers, with which the learning rate goes, not with --model.mixers")
    if given.config is not None and given.preset:
        raise UserError(f"got the preset {given.preset} and --config {given.config}; name one of the two")
    if given.config is not None:
        base = read_run(given.config)
        if given.mixers is not None:
            base = replace(base, model=replace(base.model, mixers=known_mixers(pattern(given.mixers))))
    elif given.preset:
        base = run_preset(given.preset, given.mixers or "mesa")
    else:
        return None
    length = given.training
    return with_length(base, steps=length.steps, tokens=length.tokens, warmup_steps=length.warmup_steps)
