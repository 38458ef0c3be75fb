"""Multi-query associative recall: which layers learn to look up what they have read?

A sequence shows eight pairs of a key and a value, and then the keys again, out of order; the model has to answer each
with its value. Keys and values are drawn anew for every sequence, so that nothing helps but to remember the pairs and
to find them. Each mixer gets a model of two layers, trained on fresh batches, first of two pairs, and of twice as many
whenever it has learnt those, until it answers enough of the queries of sequences that it was not trained on, or until
its steps are used up. Beginning with few pairs spares softmax attention a plateau of thousands of steps.

    python examples/multi_query_recall.py --out runs/multi-query-recall
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mesanet import LanguageModel, ModelConfig
from mesanet.bench.timing import machine
from mesanet.cli.dispatch import parse, report_errors
from mesanet.config import check_fields, check_in_range, check_not_empty, check_positive, to_dict
from mesanet.data.tasks.recall import RecallTask, recall_accuracy, recall_batch
from mesanet.io import write_atomic, write_json_atomic
from mesanet.mixers import mixer_class
from mesanet.optional import import_optional

WARM_UP = 50
"""Steps over which the learning rate rises."""
EVERY = 50
"""Steps between two looks at held-out sequences."""
HELD_OUT = 512
"""Held-out sequences; they have a seed of their own."""
FIRST_PAIRS = 2
"""Pairs in a sequence at the start of training."""
LEARNT = 0.95
"""Held-out accuracy at which the number of pairs is doubled."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train a small model of each mixer on multi-query associative recall: a table, a record and a figure."""

    mixers: tuple[str, ...] = ("attention", "gla", "mlstm", "deltanet", "gated_deltanet", "mesa")
    """Which mixers."""
    pairs: int = 8
    """Pairs of a key and a value in a sequence."""
    length: int = 64
    """Tokens in a sequence."""
    vocabulary: int = 128
    """Token ids: a filler, 63 keys and 64 values."""
    width: int = 128
    """Width of the models."""
    layers: int = 2
    """Layers of the models."""
    heads: int = 4
    """Heads of a layer; queries, keys and values of a head have width / heads channels."""
    batch: int = 16
    """Whole sequences in a training batch; of sequences with fewer pairs, as many more as have the same tokens."""
    steps: int = 2000
    """Training steps at most."""
    rate: float = 2e-3
    """Learning rate, after a linear rise."""
    enough: float = 0.99
    """Training ends at this accuracy on held-out sequences."""
    seed: int = 0
    """Seed of the weights and of the sequences."""
    out: Path = Path("runs/multi-query-recall")
    """Folder for the record and the figure."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_not_empty("mixers", self.mixers)
        for name in ("width", "layers", "heads", "batch", "steps", "rate"):
            check_positive(name, getattr(self, name))
        check_in_range("enough", self.enough, low=0, high=1)
        for mixer in self.mixers:
            mixer_class(mixer)

    def task(self, pairs: int) -> RecallTask:
        """The task with at most so many pairs, and as much shorter as it has fewer."""
        pairs = min(pairs, self.pairs)
        return RecallTask(pairs=pairs, length=self.length * pairs // self.pairs, vocabulary=self.vocabulary)


def build(options: Options, mixer: str) -> LanguageModel:
    """The model of one mixer."""
    torch.manual_seed(options.seed)
    return LanguageModel(
        ModelConfig(
            mixers=(mixer,),
            layers=options.layers,
            width=options.width,
            heads=options.heads,
            key_size=max(2, options.width // options.heads),
            vocabulary=options.vocabulary,
        )
    )


def train(options: Options, mixer: str) -> dict[str, Any]:
    """Train one model; returns what it reached, and how."""
    model = build(options, mixer)
    optimiser = torch.optim.AdamW(model.parameter_groups(0.1), lr=options.rate, betas=(0.9, 0.98))
    started = time.perf_counter()
    pairs, curve = FIRST_PAIRS, []
    for step in range(1, options.steps + 1):
        loss = training_step(options, model, optimiser, step, pairs)
        if step % EVERY != 0 and step != options.steps:
            continue
        reached = accuracy(options, model, options.pairs)
        curve.append({"step": step, "pairs": min(pairs, options.pairs), "loss": loss, "accuracy": reached})
        print(f"{mixer} step {step}: {pairs} pairs, loss {loss:.3f}, held-out accuracy {reached:.3f}", flush=True)
        if reached >= options.enough:
            break
        if pairs < options.pairs and accuracy(options, model, pairs) >= LEARNT:
            pairs *= 2
    return {
        "mixer": mixer,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": curve[-1]["step"],
        "seconds": time.perf_counter() - started,
        "accuracy": curve[-1]["accuracy"],
        "curve": curve,
    }


def training_step(
    options: Options, model: LanguageModel, optimiser: torch.optim.Optimizer, step: int, pairs: int
) -> float:
    """Take one step on a fresh batch with so many pairs; returns its loss."""
    task = options.task(pairs)
    rows = options.batch * options.length // task.length
    for group in optimiser.param_groups:
        group["lr"] = options.rate * min(1.0, step / WARM_UP)
    optimiser.zero_grad()
    loss = model.loss(*recall_batch(task, rows, seed=options.seed, step=step))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    return loss.item()


def accuracy(options: Options, model: LanguageModel, pairs: int) -> float:
    """Share of the queries of held-out sequences with so many pairs that the model answers."""
    tokens, targets = recall_batch(options.task(pairs), HELD_OUT, seed=options.seed + 1, step=0)
    model.eval()
    with torch.no_grad():
        logits, _ = model(tokens)
    model.train()
    return recall_accuracy(logits, targets)


def show(results: list[dict[str, Any]]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Multi-query associative recall", caption="accuracy on held-out sequences")
    for column in ("mixer", "parameters", "steps", "seconds", "accuracy"):
        table.add_column(column, justify="left" if column == "mixer" else "right")
    for result in results:
        table.add_row(
            result["mixer"],
            f"{result['parameters']:,}",
            str(result["steps"]),
            f"{result['seconds']:.0f}",
            f"{result['accuracy']:.1%}",
        )
    Console().print(table)


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Write the figure: accuracy against training steps."""
    figure = import_optional("matplotlib.figure", "report").Figure(figsize=(6.0, 3.8), layout="constrained")
    axes = figure.subplots()
    for result in results:
        curve = result["curve"]
        points = [point["step"] for point in curve], [point["accuracy"] for point in curve]
        axes.plot(*points, marker=".", label=result["mixer"])
    axes.set_xscale("log")
    axes.set_xlabel("training steps")
    axes.set_ylabel("accuracy on held-out sequences")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    write_atomic(path, lambda file: figure.savefig(file, format="png", dpi=150))


def run(arguments: list[str]) -> None:
    """Train every mixer, show the table, and write the record, anew after each mixer, and the figure."""
    options = parse(Options, arguments, program="multi_query_recall.py")
    import_optional("matplotlib.figure", "report")
    record: dict[str, Any] = {"settings": to_dict(options), "machine": machine(), "results": []}
    for mixer in options.mixers:
        record["results"].append(train(options, mixer))
        write_json_atomic(options.out / "recall.json", record)
    show(record["results"])
    draw(record["results"], options.out / "recall.png")
    print(f"Record and figure are in {options.out}")


if __name__ == "__main__":
    report_errors(run)
