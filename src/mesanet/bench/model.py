"""Whole models: tokens per second of a training step and of generation, every mixer beside attention, in one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mesanet import presets
from mesanet.bench.costs import model_cost, rule_cost
from mesanet.bench.model_report import SIZES, draw, progress, show
from mesanet.bench.op import checked_device
from mesanet.bench.timing import available_memory, machine, time_interleaved
from mesanet.config import check_fields, check_in_range, check_one_of, check_positive, from_dict, to_dict
from mesanet.config.model import ModelConfig
from mesanet.io import write_json_atomic
from mesanet.mixers import MIXERS, mixer_class
from mesanet.model.backbone import LanguageModel
from mesanet.model.cache import Cache
from mesanet.model.generate import prefill
from mesanet.optional import import_optional

PREFILL_CHUNK = 2048
"""Tokens of the context that are read at once."""
PAPER_LENGTH = 2048
"""Tokens in the paper's training sequences."""
SEQUENTIAL = "mesa_rls"
"""The one mixer that goes through training sequences token by token, which takes too long to be measured by default."""


@dataclass(frozen=True, kw_only=True)
class ModelBenchmark:
    """Time a training step (forward, backward, AdamW) and generation (cached, after a context) of every mixer.

    At each batch size and length all models run in turns within one process, best of several rounds. They have random
    weights and share all but their mixers, so that they fit into the memory together. The table of operations and
    state per token comes from the config alone.
    """

    preset: str = "small"
    """The size: small, medium or large, as in the paper, or any other model preset."""
    mixers: tuple[str, ...] = ()
    """Mixers, or patterns such as hawk-mesa; attention is always there. None named: all but mesa_rls."""
    width: int | None = None
    """Size of the residual stream; None for what the preset has."""
    layers: int | None = None
    """Number of layers; None for what the preset has."""
    heads: int | None = None
    """Heads of every mixer; None for what the preset has."""
    key_size: int | None = None
    """Size of a query and of a key of one head; None for what the preset has."""
    vocabulary: int | None = None
    """Number of token ids; None for what the preset has."""
    batch: tuple[int, ...] = (1,)
    """Batch sizes."""
    lengths: tuple[int, ...] = (512, 2048)
    """Sequence lengths of the training steps; none leaves training out."""
    context: tuple[int, ...] = (1024, 8192)
    """Tokens that generation comes after; none leaves generation out."""
    tokens: int = 16
    """Tokens that are generated in each round."""
    max_steps: int | None = None
    """The most steps of mesa's solver, in training and generation; None for what the preset has."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the parameters."""
    repeats: int = 3
    """Rounds that count, after one that does not."""
    seconds: float = 300.0
    """At each batch size and length, no further round begins when it would end after this many seconds."""
    device: str = "cpu"
    """Where to run: cpu, cuda, cuda:1 ..."""
    threads: int | None = None
    """Threads of torch on the processor; None leaves torch's own choice."""
    seed: int = 0
    """Seed of the weights and the tokens."""
    out: Path = Path("runs/bench-model")
    """Folder for the record, model.json, and the figure, model.png."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_one_of("preset", self.preset, presets.MODELS)
        for pattern in self.mixers:
            for name in presets.pattern(pattern):
                mixer_class(name)
        for field in ("batch", "lengths", "context"):
            for position, value in enumerate(getattr(self, field)):
                check_positive(f"{field}[{position}]", value)
        for name in ("tokens", "repeats", "seconds"):
            check_positive(name, getattr(self, name))
        for name in (*SIZES, "threads"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        if self.max_steps is not None:
            check_in_range("max_steps", self.max_steps, low=0)
        for pattern in self.patterns:
            self.config(pattern)  # Refuses what does not go together, such as attention with keys of an odd size.

    @property
    def patterns(self) -> tuple[str, ...]:
        """Attention, and then all else that is measured."""
        named = self.mixers or tuple(name for name in MIXERS if name != SEQUENTIAL)
        return tuple(dict.fromkeys(("attention", *named)))

    def config(self, pattern: str) -> ModelConfig:
        """The model with this pattern of mixers."""
        given = {name: getattr(self, name) for name in SIZES if getattr(self, name) is not None}
        config = to_dict(presets.model(self.preset, pattern)) | given | {"dtype": self.dtype}
        if self.max_steps is not None:
            for solver in ("training_solver", "inference_solver"):
                config[solver] = {**config[solver], "max_steps": self.max_steps}
        return from_dict(ModelConfig, config)


def run_model_benchmark(options: ModelBenchmark) -> dict[str, Any]:
    """Measure, show the tables, and write the record and the figure; returns the record.

    The record is written anew after every measurement, so that an interrupted run keeps what it has.
    """
    device = checked_device(options.device)
    import_optional("matplotlib.figure", "report")  # Better missed now than after minutes of measuring.
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    record: dict[str, Any] = {
        "benchmark": "model",
        "settings": to_dict(options),
        "machine": machine(device),
        "costs": [
            model_cost(options.config(pattern), at).record()
            for at in positions(options)
            for pattern in options.patterns
        ],
        "training": [],
        "generation": [],
    }
    models = build_models(options, device) if options.lengths or options.context else {}
    for kind, lengths, measure in (
        ("training", options.lengths, measure_training),
        ("generation", options.context, measure_generation),
    ):
        for batch in options.batch:
            for length in lengths:
                row = measure(options, models, batch, length, device)
                record[kind].append(row)
                write_json_atomic(options.out / "model.json", record)
                print(progress(kind, row), flush=True)
    write_json_atomic(options.out / "model.json", record)
    show(record)
    draw(record, options.out / "model.png")
    print(f"Record and figure are in {options.out}")
    return record


def positions(options: ModelBenchmark) -> tuple[int, ...]:
    """Where in the text the table of costs looks: after each context, or at the end of each training sequence."""
    return tuple(sorted(set(options.context or options.lengths or (PAPER_LENGTH,))))


def build_models(options: ModelBenchmark, device: torch.device) -> dict[str, LanguageModel]:
    """One model for each pattern. They share embedding, norms and MLPs, which take most of the memory."""
    models: dict[str, LanguageModel] = {}
    for pattern in options.patterns:
        torch.manual_seed(options.seed)
        model = LanguageModel(options.config(pattern))
        if models:
            first = models["attention"]
            model.embedding, model.norm = first.embedding, first.norm
            for block, shared in zip(model.blocks, first.blocks, strict=True):
                block.mixer_norm, block.mlp_norm, block.mlp = shared.mixer_norm, shared.mlp_norm, shared.mlp
        models[pattern] = model.to(device)
    return models


def measure_training(
    options: ModelBenchmark, models: dict[str, LanguageModel], batch: int, length: int, device: torch.device
) -> dict[str, Any]:
    """Time a training step of every model."""
    shape = {"batch": batch, "length": length}
    trained = sum(parameter.numel() for parameter in shared_parameters(models))
    # Gradients and both moments; then what a layer keeps for the backward pass, in multiples of the width, plus the
    # states at the chunk boundaries of the mixer that has the largest, and a few copies of the logits of a piece.
    config = options.config("attention")
    kept = (
        batch
        * length
        * config.layers
        * (12 * config.width + 6 * config.mlp_width + 12 * config.heads * config.key_size)
    )
    reason = missing_memory(4 * (3 * trained + kept), device)
    if reason is not None:
        return {**shape, "skipped": reason}
    generator = torch.Generator().manual_seed(options.seed + 1)
    tokens = torch.randint(config.vocabulary, (batch, length + 1), generator=generator).to(device)
    # One optimiser for all: it passes over parameters without a gradient, and the shared ones have one state.
    optimiser = torch.optim.AdamW(shared_parameters(models), lr=1e-5)

    def step(model: LanguageModel) -> Tensor:
        optimiser.zero_grad(set_to_none=True)
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimiser.step()
        return loss.detach()

    work = {name: partial(step, model.train()) for name, model in models.items()}
    result = throughput(options, work, batch * length, device)
    optimiser.zero_grad(set_to_none=True)
    return shape | result


def measure_generation(
    options: ModelBenchmark, models: dict[str, LanguageModel], batch: int, length: int, device: torch.device
) -> dict[str, Any]:
    """Time greedy generation of every model, which goes on from round to round after a context of random tokens."""
    shape = {"batch": batch, "length": length}
    states = [rule_cost(options.config(pattern), length).state for pattern in models]
    # Attention's cache has room for twice as much as is in it, and exists twice while it grows.
    reason = missing_memory(4 * batch * 3 * sum(states), device)
    if reason is not None:
        return {**shape, "skipped": reason}
    generator = torch.Generator().manual_seed(options.seed + 2)
    context = torch.randint(options.config("attention").vocabulary, (batch, length), generator=generator).to(device)
    decoders = {name: Decoder(model.eval(), context) for name, model in models.items()}
    work = {name: partial(decoder.advance, options.tokens) for name, decoder in decoders.items()}
    result = throughput(options, work, batch * options.tokens, device)
    caches = {name: decoder.cache.nbytes for name, decoder in decoders.items()}
    steps = {name: decoder.solver_steps() for name, decoder in decoders.items()}
    solver = {name: taken for name, taken in steps.items() if taken is not None}
    return shape | result | {"cache_bytes": caches, "solver_steps_by_layer": solver}


class Decoder:
    """A model that has read a context and goes on, one token after the other."""

    def __init__(self, model: LanguageModel, context: Tensor) -> None:
        self.model = model
        with torch.no_grad():
            logits, self.cache = prefill(model, context, None, PREFILL_CHUNK)
        self.tokens = logits.argmax(-1, keepdim=True)

    def advance(self, count: int) -> None:
        """Generate `count` tokens for every row."""
        with torch.no_grad():
            for _ in range(count):
                logits, self.cache = self._next()
                self.tokens = logits[:, -1].argmax(-1, keepdim=True)

    def solver_steps(self) -> list[float] | None:
        """Mean solver steps of the next token in each mesa layer; None without such layers."""
        with torch.no_grad(), self.model.observe() as seen:
            self._next()
        steps = [observation.steps.float().mean().item() for observation in seen if observation.steps is not None]
        return steps or None

    def _next(self) -> tuple[Tensor, Cache]:
        logits, cache = self.model(self.tokens, self.cache, last=1)
        return logits, cache


def throughput(
    options: ModelBenchmark, work: Mapping[str, Callable[[], object]], tokens: int, device: torch.device
) -> dict[str, Any]:
    """Time the callables in turns; each handles `tokens` tokens."""
    timings = time_interleaved(work, repeats=options.repeats, budget=options.seconds, device=device)
    rates = {name: tokens / timing.best for name, timing in timings.items()}
    return {
        "seconds": {name: list(timing.seconds) for name, timing in timings.items()},
        "tokens_per_second": rates,
        "to_attention": {name: rate / rates["attention"] for name, rate in rates.items()},
    }


def shared_parameters(models: dict[str, LanguageModel]) -> list[torch.nn.Parameter]:
    """The parameters of all models, each once."""
    return list(dict.fromkeys(parameter for model in models.values() for parameter in model.parameters()))


def missing_memory(needed: int, device: torch.device) -> str | None:
    """Why a measurement that needs so many bytes can't run; None if it can."""
    there = available_memory(device)
    if there is None or needed <= there:
        return None
    return f"needs about {needed / 2**30:.1f} GiB of memory, {there / 2**30:.1f} GiB are free"
