"""Table and figure of `mesanet bench gated`, made from its record only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mesanet.io import write_atomic
from mesanet.optional import import_optional


def progress(record: dict[str, Any]) -> str:
    """One line about what was measured and what was not."""
    measured = ", ".join(str(row["time"]) for row in record["lengths"]) or "none"
    skipped = ", ".join(map(str, record["skipped"]))
    return f"T = {measured}" + (f"; skipped for want of memory: {skipped}" if skipped else "")


def show(record: dict[str, Any]) -> None:
    """Print the table: milliseconds, and each time over softmax attention's and over transformers' delta rule's."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    settings, host, rows = record["settings"], record["machine"], record["lengths"]
    console = Console()
    if not rows:
        console.print("Nothing fitted into the memory.")
        return
    table = Table(
        title=f"Forward+backward, B{settings['batch']} H{settings['heads']} K{settings['key_size']} "
        f"{settings['dtype']} (milliseconds)",
        caption=f"{host.get('accelerator') or host['processor']}, {host['threads']} threads, torch {host['torch']}. "
        "/sdpa: times the time of causal softmax attention. Best of the rounds.",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("op")
    for row in rows:
        table.add_column(f"T={row['time']}", justify="right")
        table.add_column("/sdpa", justify="right")
    for name in rows[0]["best"]:
        cells = []
        for row in rows:
            best = row["best"]
            cells.append(f"{1e3 * best[name]:.1f}" if name in best else "-")
            cells.append(f"{best[name] / best['sdpa']:.2f}" if name in best and "sdpa" in best else "-")
        table.add_row(name, *cells)
    console.print(table)
    for line in summary(record):
        console.print(line, highlight=False)


def summary(record: dict[str, Any]) -> list[str]:
    """The sentences under the table: how time grows with the length, and how much faster than transformers we are."""
    rows = record["lengths"]
    lines = []
    if len(rows) > 1:
        short, long = rows[0], rows[-1]
        growth = [
            f"{name} {long['best'][name] / seconds:.2f}"
            for name, seconds in short["best"].items()
            if name in long["best"]
        ]
        lines.append(f"time({long['time']}) / time({short['time']}): {', '.join(growth)}.")
    best = rows[0]["best"]
    if "transformers" in best and "gated_deltanet" in best:
        times = best["transformers"] / best["gated_deltanet"]
        lines.append(f"Gated DeltaNet at T = {rows[0]['time']}: {times:.1f} times as fast as that of transformers.")
    return lines


def draw(record: dict[str, Any], path: Path) -> None:
    """Write the figure: microseconds per token of each op, a bar for each length."""
    rows = record["lengths"]
    if not rows:
        return
    figure = import_optional("matplotlib.figure", "report").Figure(figsize=(8.0, 3.8), layout="constrained")
    axes = figure.subplots()
    names = list(rows[0]["best"])
    width = 0.8 / len(rows)
    for number, row in enumerate(rows):
        best = row["best"]
        shown = [name for name in names if name in best]
        places = [names.index(name) + (number - (len(rows) - 1) / 2) * width for name in shown]
        tokens = record["settings"]["batch"] * row["time"]
        axes.bar(places, [1e6 * best[name] / tokens for name in shown], width, label=f"T = {row['time']}")
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.set_ylabel("microseconds per token")
    axes.set_title("forward+backward")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    write_atomic(path, lambda file: figure.savefig(file, format="png", dpi=150))
