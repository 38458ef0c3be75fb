"""Table and figure of `mesanet bench op`, made from its record only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mesanet.io import write_atomic
from mesanet.optional import import_optional


def progress(row: dict[str, Any]) -> str:
    """One line about one length."""
    if "skipped" in row:
        return f"T = {row['time']}: skipped, {row['skipped']}"
    best = row["best"]
    return (
        f"T = {row['time']}: forward {best['mesa forward']:.3g} s, {row['forward_ratio']:.2f} of softmax attention's; "
        f"forward+backward {best['mesa forward+backward']:.3g} s, {row['training_ratio']:.2f} of softmax attention's"
    )


def show(record: dict[str, Any]) -> None:
    """Print the table of what has been measured so far."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    settings, host = record["settings"], record["machine"]
    console = Console()
    table = Table(
        title=f"Mesa op, B{settings['batch']} H{settings['heads']} K{settings['key_size']} {settings['dtype']}, "
        f"tolerance {settings['tolerance']:g} (milliseconds)",
        caption=f"{host.get('accelerator') or host['processor']}, {host['threads']} threads, torch {host['torch']}. "
        "sdpa is causal softmax attention, plain the solver's fixed steps without a preconditioner, and rate what "
        "they reach of the matrix product's floating-point rate. Best of the rounds.",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    columns = ("T", "mesa", "sdpa", "ratio", "mesa+back", "sdpa+back", "ratio", "steps", "plain", "rate")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in record["lengths"]:
        if "skipped" in row:
            table.add_row(str(row["time"]), *["-"] * (len(columns) - 1))
        else:
            table.add_row(*_cells(row))
    console.print(table)
    for line in summary(record):
        console.print(line, highlight=False)


def summary(record: dict[str, Any]) -> list[str]:
    """The sentences under the table: the matrix product's rate, steps by head, growth with the length."""
    measured = [row for row in record["lengths"] if "skipped" not in row]
    if not measured:
        return ["Nothing fitted into the memory."]
    last = measured[-1]
    steps = ", ".join(f"{mean:.1f}/{worst:.0f}" for mean, worst in _per_head(last))
    lines = [
        f"Matrix product {record['matrix_size']} x {record['matrix_size']}: "
        f"{max(row['matrix_product_gflops'] for row in measured):.1f} GFLOP/s.",
        f"Solver steps by head at T = {last['time']}, mean/worst: {steps}.",
    ]
    times = {row["time"]: row["best"]["mesa forward+backward"] for row in measured}
    pairs = [(t, 4 * t) for t in sorted(times) if 4 * t in times]
    lines += [f"Mesa forward+backward, time({b}) / time({a}) = {times[b] / times[a]:.2f}." for a, b in pairs]
    return lines


def draw(record: dict[str, Any], path: Path) -> None:
    """Write the figure: time against length, both axes logarithmic, forward beside forward+backward."""
    measured = [row for row in record["lengths"] if "skipped" not in row]
    if not measured:
        return
    figure_module = import_optional("matplotlib.figure", "report")
    figure = figure_module.Figure(figsize=(9.0, 3.8), layout="constrained")
    lengths = [row["time"] for row in measured]
    for axes, part in zip(figure.subplots(1, 2, sharey=True), ("forward", "forward+backward"), strict=True):
        for name, label in (("mesa", "Mesa"), ("attention", "softmax attention")):
            axes.plot(lengths, [row["best"][f"{name} {part}"] for row in measured], marker="o", label=label)
        if part == "forward":
            label = f"Mesa, {record['settings']['plain_steps']} plain steps"
            axes.plot(
                lengths, [row["best"]["mesa plain forward"] for row in measured], marker="s", ls="--", label=label
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.set_xlabel("sequence length T")
        axes.set_title(part)
        axes.grid(which="major", alpha=0.3)
        axes.legend(frameon=False)
    figure.axes[0].set_ylabel("seconds, best of the rounds")
    write_atomic(path, lambda file: figure.savefig(file, format="png", dpi=150))


def _cells(row: dict[str, Any]) -> list[str]:
    best = {name: f"{1e3 * seconds:.1f}" for name, seconds in row["best"].items()}
    means, worst = zip(*_per_head(row), strict=True)
    return [
        str(row["time"]),
        best["mesa forward"],
        best["attention forward"],
        f"{row['forward_ratio']:.2f}",
        best["mesa forward+backward"],
        best["attention forward+backward"],
        f"{row['training_ratio']:.2f}",
        f"{sum(means) / len(means):.1f}/{max(worst):.0f}",
        best["mesa plain forward"],
        f"{100 * row['plain_share_of_matrix_product']:.0f} %",
    ]


def _per_head(row: dict[str, Any]) -> list[tuple[float, float]]:
    return list(zip(row["steps_mean_by_head"], row["steps_max_by_head"], strict=True))
