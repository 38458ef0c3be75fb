"""Tables and figure of `mesanet bench model`, made from its record only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mesanet.io import write_atomic
from mesanet.optional import import_optional

KINDS = {"training": ("Training step", "sequence length"), "generation": ("Generation", "context")}
"""What is measured: its title, and what its lengths are."""
SIZES = ("width", "layers", "heads", "key_size", "vocabulary")
"""Settings that may take the place of the preset's."""
COSTS = ("layer_update", "layer_output", "layer_output_direct", "layer_state", "state", "total")
"""Columns of the table of costs."""
STYLES = ("-", "--", ":", "-.")
"""A line for each batch size."""


def progress(kind: str, row: dict[str, Any]) -> str:
    """One line about one batch size and length."""
    place = f"{kind}, batch {row['batch']}, {KINDS[kind][1]} {row['length']}"
    if "skipped" in row:
        return f"{place}: skipped, {row['skipped']}"
    rates = ", ".join(f"{name} {rate:,.1f}" for name, rate in row["tokens_per_second"].items())
    return f"{place}: {rates} tokens per second"


def show(record: dict[str, Any]) -> None:
    """Print a table of tokens per second for training and generation, and the table of costs."""
    from rich.console import Console

    console = Console()
    for kind in KINDS:
        if any("skipped" not in row for row in record[kind]):
            console.print(speed_table(record, kind))
    console.print(cost_table(record))


def model_name(settings: dict[str, Any]) -> str:
    """The preset, and what differs from it: small, width 256, key size 64."""
    given = [f"{name.replace('_', ' ')} {settings[name]}" for name in SIZES if settings[name] is not None]
    return ", ".join([settings["preset"], *given])


def speed_table(record: dict[str, Any], kind: str) -> Any:
    """Tokens per second, and in brackets over attention's."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    settings, host = record["settings"], record["machine"]
    title, what = KINDS[kind]
    table = Table(
        title=f"{title}, {model_name(settings)}, {settings['dtype']}: tokens per second (over attention's)",
        caption=f"{host.get('accelerator') or host['processor']}, {host['threads']} threads, torch {host['torch']}. "
        "Best of the rounds.",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    rows = [row for row in record[kind] if "skipped" not in row]
    table.add_column("mixer", no_wrap=True)
    for row in rows:
        table.add_column(f"B{row['batch']}, {what} {row['length']}", justify="right")
    for name in rows[0]["tokens_per_second"]:
        cells = [f"{row['tokens_per_second'][name]:,.1f} ({row['to_attention'][name]:.2f})" for row in rows]
        table.add_row(name, *cells)
    return table


def cost_table(record: dict[str, Any]) -> Any:
    """Operations of a layer's rule, numbers in its state, and the same of the whole model."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    solver = max(row["steps"] for row in record["costs"])
    table = Table(
        title=f"Cost of a token, {model_name(record['settings'])} (from the config)",
        caption=f"Operations that bring a layer's state up to date and read its output; mesa takes {solver} solver "
        "steps, or solves directly, as it does while generating. State counts numbers. Model adds projections, MLPs "
        "and logits.",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("mixer", no_wrap=True)
    for column in (
        "at",
        "layer update",
        "layer output",
        "solved directly",
        "layer state",
        "model state",
        "model",
        "of it rules",
    ):
        table.add_column(column, justify="right")
    for row in record["costs"]:
        table.add_row(
            row["mixers"],
            str(row["position"]),
            *(short(row[name]) for name in COSTS),
            f"{row['rule'] / row['total']:.1%}",
        )
    return table


def short(number: float) -> str:
    """1234567 -> 1.23M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:g}"


def draw(record: dict[str, Any], path: Path) -> None:
    """Write the figure: tokens per second against length, training beside generation, a line style per batch size."""
    kinds = [kind for kind in KINDS if any("skipped" not in row for row in record[kind])]
    if not kinds:
        return
    figure = import_optional("matplotlib.figure", "report").Figure(
        figsize=(1.5 + 4.2 * len(kinds), 4.0), layout="constrained"
    )
    for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        title, what = KINDS[kind]
        rows = [row for row in record[kind] if "skipped" not in row]
        batches = sorted({row["batch"] for row in rows})
        for place, batch in enumerate(batches):
            own = sorted((row for row in rows if row["batch"] == batch), key=lambda row: int(row["length"]))
            for number, name in enumerate(own[0]["tokens_per_second"]):
                axes.plot(
                    [row["length"] for row in own],
                    [row["tokens_per_second"][name] for row in own],
                    linestyle=STYLES[place % len(STYLES)],
                    marker="o",
                    markersize=4,
                    color=f"C{number}" if number < 10 else "black",
                    label=f"{name}, batch {batch}" if len(batches) > 1 else name,
                )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        lengths = sorted({row["length"] for row in rows})
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.set_xlabel(what)
        axes.set_ylabel("tokens per second, best of the rounds")
        axes.set_title(title)
        axes.grid(which="major", alpha=0.3)
    figure.axes[-1].legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    write_atomic(path, lambda file: figure.savefig(file, format="png", dpi=150))
