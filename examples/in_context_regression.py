"""In-context regression: how fast does each update rule learn a linear map from the examples in its context?

Every sequence has a hidden linear map W. Token t shows an input x_t, a unit vector of which some directions vary much
more than others, and the noisy answer y_t = W_t x_t + noise. After every token the state is asked for the answer to the
next input. In the first task W stays; in the second it drifts, so that forgetting pays off.

The Mesa rule is compared with linear attention and the delta rule, each with a forget gate and one more setting (the
ridge, or the write gate), chosen for each rule on sequences of their own. With W fixed and Gaussian, exact ridge
regression is the best that any rule can do.

    python examples/in_context_regression.py --out runs/demo
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

import mesanet
from mesanet.cli.dispatch import parse, report_errors
from mesanet.config import check_fields, check_in_range, check_positive, to_dict
from mesanet.io import write_atomic, write_json_atomic
from mesanet.ops import reference
from mesanet.optional import import_optional


@dataclass(frozen=True, kw_only=True)
class Options:
    """In-context regression with the Mesa rule, linear attention and the delta rule: a table and a figure."""

    length: int = 256
    """Examples in a sequence."""
    sequences: int = 64
    """Sequences that the errors are averaged over; as many more choose each rule's settings."""
    input_size: int = 32
    """Size of x."""
    output_size: int = 8
    """Size of y."""
    noise: float = 0.1
    """Standard deviation of the noise, where answers have a standard deviation of 1."""
    drift: float = 0.005
    """Share of the variance of W that is new at every token of the second task."""
    seed: int = 0
    """Seed of the sequences."""
    out: Path = Path("runs/demo")
    """Folder for the record and the figure."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("length", "sequences", "input_size", "output_size"):
            check_positive(name, getattr(self, name))
        check_in_range("noise", self.noise, low=0)
        check_in_range("drift", self.drift, low=0, high=1)


class Task(NamedTuple):
    """Sequences of examples, with a dimension for the heads: each head is one setting of a rule."""

    q: Tensor
    """[B, T, 1, K]: the input that is asked about after each example."""
    k: Tensor
    """[B, T, 1, K]: the input of each example."""
    v: Tensor
    """[B, T, 1, V]: the noisy answer of each example."""
    goal: Tensor
    """[B, T, 1, V]: the answer to `q`, without noise."""


class Setting(NamedTuple):
    """What is chosen for each rule: the forget gate, and the ridge or the write gate."""

    gamma: float
    strength: float


GAMMAS = (1.0, 0.9975, 0.99, 0.98, 0.96, 0.93, 0.9)
RIDGES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
WRITES = (0.01, 0.03, 0.1, 0.2, 0.4, 0.7, 1.0)


def draw_task(options: Options, drift: float, seed: int) -> Task:
    """Draw sequences of T + 1 inputs and of the maps that answer them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    batch, inputs, outputs = options.sequences, options.input_size, options.output_size
    spread = torch.arange(1, inputs + 1).rsqrt()  # The i-th direction has a variance of 1 / i.
    x = normalize(normal(batch, options.length + 1, inputs) * spread, dim=-1)
    weights = normal(batch, outputs, inputs)
    answers = []
    for t in range(options.length + 1):
        answers.append(torch.einsum("bvk,bk->bv", weights, x[:, t]))
        weights = (1 - drift) ** 0.5 * weights + drift**0.5 * normal(batch, outputs, inputs)
    clean = torch.stack(answers, dim=1)
    noisy = clean + options.noise * normal(*clean.shape)
    return Task(*(tensor.unsqueeze(2) for tensor in (x[:, 1:], x[:, :-1], noisy[:, :-1], clean[:, 1:])))


def gates(task: Task, settings: list[Setting]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Repeat the sequences for every setting, a head each: q, k, v, log_decay, and each setting's strength [H]."""
    heads = len(settings)
    batch, time = task.q.shape[:2]
    q, k, v = (tensor.expand(-1, -1, heads, -1) for tensor in task[:3])
    log_decay = torch.tensor([setting.gamma for setting in settings]).log().expand(batch, time, heads)
    return q, k, v, log_decay, torch.tensor([setting.strength for setting in settings])


def mesa(task: Task, settings: list[Setting]) -> Tensor:
    """Predictions [B, T, H, V] of the Mesa rule; the strength is the ridge."""
    q, k, v, log_decay, ridge = gates(task, settings)
    ridges = ridge.unsqueeze(-1).expand(-1, q.shape[-1])
    return mesanet.mesa(q, k, v, log_decay, torch.ones_like(log_decay), ridges).output


def exact_ridge(task: Task, settings: list[Setting]) -> Tensor:
    """The same by a dense solve at every token in double precision: what `mesa` has to reproduce."""
    q, k, v, log_decay, ridge = (tensor.double() for tensor in gates(task, settings))
    ridges = ridge.unsqueeze(-1).expand(-1, q.shape[-1])
    return reference.mesa(q, k, v, log_decay, torch.ones_like(log_decay), ridges)[0]


def linear_attention(task: Task, settings: list[Setting]) -> Tensor:
    """Predictions of gated linear attention; the strength is the write gate."""
    q, k, v, log_decay, write = gates(task, settings)
    return reference.gated_linear_attention(q, k, v, log_decay, write.expand_as(log_decay))[0]


def delta_rule(task: Task, settings: list[Setting]) -> Tensor:
    """Predictions of the gated delta rule; the strength is the write gate."""
    q, k, v, log_decay, write = gates(task, settings)
    return reference.gated_delta_rule(q, k, v, log_decay, write.expand_as(log_decay))[0]


Rule = Callable[[Task, list[Setting]], Tensor]
RULES: dict[str, tuple[Rule, tuple[float, ...]]] = {
    "linear attention": (linear_attention, WRITES),
    "delta rule": (delta_rule, WRITES),
    "Mesa": (mesa, RIDGES),
}


def errors(prediction: Tensor, task: Task) -> Tensor:
    """Mean squared error [T, H] of predictions [B, T, H, V], as a share of the answers' variance."""
    return (prediction - task.goal).square().mean((0, 3)) / task.goal.square().mean()


def compare(options: Options, drift: float) -> dict[str, Any]:
    """Choose each rule's setting on one draw and measure it on another."""
    chosen_on = draw_task(options, drift, options.seed + 1)
    measured_on = draw_task(options, drift, options.seed)
    curves, chosen = {}, {}
    for name, (rule, strengths) in RULES.items():
        settings = [Setting(gamma, strength) for gamma, strength in product(GAMMAS, strengths)]
        best = settings[int(errors(rule(chosen_on, settings), chosen_on).mean(0).argmin())]
        chosen[name] = best._asdict()
        curves[name] = errors(rule(measured_on, [best]), measured_on)[:, 0].tolist()
    best_mesa = [Setting(**chosen["Mesa"])]
    truth = exact_ridge(measured_on, best_mesa)
    deviation = (mesa(measured_on, best_mesa) - truth).norm() / truth.norm()
    return {"drift": drift, "settings": chosen, "error": curves, "mesa_deviation_from_exact_ridge": float(deviation)}


def show(title: str, result: dict[str, Any]) -> None:
    """Print the errors at positions 1, 2, 4, 8, ..."""
    from rich.console import Console
    from rich.table import Table

    curves = result["error"]
    length = len(curves["Mesa"])
    table = Table(title=f"{title}: squared error by number of examples", caption="1 is always answering zero")
    table.add_column("examples", justify="right")
    for name in curves:
        table.add_column(name, justify="right")
    for position in sorted({*(2**power for power in range(length.bit_length())), length}):
        table.add_row(str(position), *(f"{curve[position - 1]:.4f}" for curve in curves.values()))
    table.add_row("mean", *(f"{sum(curve) / length:.4f}" for curve in curves.values()), style="bold")
    console = Console()
    console.print(table)
    for name, setting in result["settings"].items():
        kind = "ridge" if name == "Mesa" else "write"
        console.print(f"  {name}: gamma {setting['gamma']:g}, {kind} {setting['strength']:g}", highlight=False)
    console.print(f"  Mesa differs from the exact solve by {result['mesa_deviation_from_exact_ridge']:.1e}.\n")


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Write the figure: error against position, a panel for each task."""
    figure = import_optional("matplotlib.figure", "report").Figure(figsize=(9.0, 3.8), layout="constrained")
    for axes, (title, result) in zip(figure.subplots(1, len(results), sharey=True), results.items(), strict=True):
        for name, curve in result["error"].items():
            axes.plot(range(1, len(curve) + 1), curve, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(title)
        axes.set_xlabel("examples in the context")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("squared error / variance of the answers")
    figure.axes[0].legend(frameon=False)
    write_atomic(path, lambda file: figure.savefig(file, format="png", dpi=150))


def run(arguments: list[str]) -> None:
    """Run both tasks, show their tables, and write the record and the figure."""
    options = parse(Options, arguments, program="in_context_regression.py")
    import_optional("matplotlib.figure", "report")
    results = {"fixed map": compare(options, 0.0), "drifting map": compare(options, options.drift)}
    for title, result in results.items():
        show(title, result)
    write_json_atomic(options.out / "regression.json", {"options": to_dict(options), "results": results})
    draw(results, options.out / "regression.png")
    print(f"Record and figure are in {options.out}")


if __name__ == "__main__":
    report_errors(run)
