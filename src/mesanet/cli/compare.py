"""`mesanet compare PRESET`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from mesanet.cli.dispatch import parse
from mesanet.cli.processes import is_first, only_first_speaks
from mesanet.config.compare import CompareConfig
from mesanet.training.told import same_for_all


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train several mixers on the same tokens in the same order, evaluate them, and write a report with figures.

    The same command goes on where it was stopped. With other --mixers it adds them to the report. Several processes
    share the training: `torchrun --nproc-per-node 8 -m mesanet compare PRESET --parallel fsdp`.
    """

    preset: Positional[Annotated[str, arg(metavar="PRESET")]]
    """A training preset: demo, laptop, small-15b, ...; see `mesanet train --help`."""
    mixers: tuple[str, ...] = ()
    """Mixers, or patterns such as hawk-mesa, with spaces or commas in between; if none is named all of them, or three
    for the demo."""
    out: Path | None = None
    """Folder for the runs and the report; runs/compare-PRESET if not given."""
    data: Path | None = None
    """Folder that `mesanet data prepare` wrote, instead of the preset's data."""
    steps: int | None = None
    """Updates of each model, instead of the preset's number."""
    precision: Literal["float32", "bfloat16"] | None = None
    """Precision of training, instead of the preset's."""
    parallel: Literal["none", "ddp", "fsdp"] | None = None
    """How several processes share the training: ddp copies the weights, fsdp shards them."""
    accumulation: int | None = None
    """Parts that a process cuts its sequences of a step into, one after the other, to save memory."""
    activation_checkpointing: bool | None = None
    """Compute activations again on the way back instead of keeping them."""
    device: Literal["auto", "cpu", "cuda"] | None = None
    """Where to compute, instead of where the preset does."""
    tokens: int | None = None
    """Held-out tokens for perplexity and for the loss by position, at most; None for the preset's number."""
    longest: int = 16
    """Length extrapolation goes up to this multiple of the training length, as far as documents allow; 1 for none."""
    prompt: str | None = None
    """What the sample of generated text begins with; None for the preset's."""


def run(arguments: list[str]) -> None:
    """Compare, and say where the report is."""
    with only_first_speaks():
        with same_for_all():
            config = parse_comparison(arguments)
        from mesanet.compare import compare

        page = compare(config, command=["mesanet", "compare", *arguments])
    if is_first():
        print(page)


def parse_comparison(arguments: list[str]) -> CompareConfig:
    """The comparison of the preset, with what the options say instead."""
    options = parse(Options, arguments, program="mesanet compare")
    from mesanet.compare.presets import compare_preset
    from mesanet.training.presets import run_preset

    run_preset(options.preset)
    config = compare_preset(options.preset, options.out or Path("runs") / f"compare-{options.preset}")
    same = ("data", "steps", "longest", "precision", "parallel", "accumulation", "activation_checkpointing", "device")
    return replace(
        config,
        **{name: getattr(options, name) for name in same},
        mixers=options.mixers or config.mixers,
        tokens=config.tokens if options.tokens is None else options.tokens,
        prompt=config.prompt if options.prompt is None else options.prompt,
    )
