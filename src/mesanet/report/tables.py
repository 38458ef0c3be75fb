"""The tables of a comparison, as rows of text under a head."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mesanet.report.comparison import Comparison, Run
from mesanet.report.evaluations import Record, same_tokens, solver_text
from mesanet.report.positions import mean_so_far, positions_of
from mesanet.report.style import mixer_name


class Table(NamedTuple):
    """Cells as text; the first column names the row."""

    head: list[str]
    rows: list[list[str]]
    best: list[int | None]
    """For each column, the row with the best value."""


def perplexity_table(comparison: Comparison) -> Table:
    """Each model: size, learning rate, speed, loss and perplexity on held-out text, and the difference to attention."""
    head = ["model", "parameters", "peak learning rate", "training tokens/s", "NLL", "perplexity"]
    runs = [run for run in comparison.runs if run.position is not None]
    base = comparison.base
    relative = base is not None and base.position is not None and len(runs) > 1
    rows = []
    for run in runs:
        assert run.position is not None
        summary = run.position["summary"]
        row = [
            mixer_name(run.mixers),
            f"{run.position['model']['parameters']:,}",
            f"{run.learning_rate:g}",
            "-" if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}",
            f"{summary['nll']:.4f}",
            perplexity_text(summary["perplexity"]),
        ]
        if relative and base is not None and base.position is not None:
            row.append("" if run is base else _paired(run.position, base.position))
        rows.append(row)
    if relative:
        head.append("NLL relative to attention")
    losses = [run.position["summary"]["nll"] for run in runs if run.position is not None]
    speeds = [run.tokens_per_second or 0 for run in runs]
    best = int(np.argmin(losses)) if rows else None
    fastest = int(np.argmax(speeds)) if rows else None
    return Table(head, rows, [None, None, None, fastest, best, best, None][: len(head)])


def extrapolation_table(comparison: Comparison) -> Table:
    """Mean-so-far perplexity of each model at the training length and its multiples."""
    runs = [run for run in comparison.runs if run.extrapolation is not None]
    longest = max((len(run.extrapolation["positions"]["sum"]) for run in runs if run.extrapolation), default=0)
    lengths = [comparison.length]
    while lengths[-1] * 2 <= longest:
        lengths.append(lengths[-1] * 2)
    values = []
    for run in runs:
        assert run.extrapolation is not None
        so_far = np.exp(mean_so_far(positions_of(run.extrapolation)))
        values.append([float(so_far[length - 1]) if length <= len(so_far) else np.nan for length in lengths])
    rows = [
        [mixer_name(run.mixers), *("-" if np.isnan(value) else f"{value:.2f}" for value in row)]
        for run, row in zip(runs, values, strict=True)
    ]
    best = [int(np.nanargmin(column)) if np.isfinite(column).any() else None for column in np.array(values).T]
    return Table(["model", *(f"{length:,}" for length in lengths)], rows, [None, *best])


def solver_table(run: Run) -> Table:
    """Loss and mean steps of a model at each setting of its solver."""
    records = sorted(run.solver, key=lambda record: float(record["steps"]["mean"]))
    rows = [
        [
            solver_text(record),
            f"{record['steps']['mean']:.2f}",
            f"{record['summary']['nll']:.4f}",
            perplexity_text(record["summary"]["perplexity"]),
        ]
        for record in records
    ]
    return Table(["solver", "mean steps", "NLL", "perplexity"], rows, [None] * 4)


def perplexity_text(value: float | None) -> str:
    """Two digits, or a dash where it is more than a float holds."""
    return "-" if value is None else f"{value:.2f}"


def html_table(table: Table) -> str:
    """The table for a page; the best values are bold."""
    lines = ["<table>", "<thead><tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in table.head) + "</tr></thead>"]
    lines.append("<tbody>")
    for number, row in enumerate(table.rows):
        cells = [
            f"<b>{escape(cell)}</b>" if best == number else escape(cell)
            for cell, best in zip(row, table.best, strict=True)
        ]
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return "\n".join([*lines, "</tbody>", "</table>"])


def escape(text: str) -> str:
    """Text as it can stand in a page."""
    from html import escape as html_escape

    return html_escape(text)


def _paired(record: Record, base: Record) -> str:
    """The difference in loss and its standard error, which the windows that both have read in common give."""
    if not same_tokens(record, base):
        return "-"
    tokens = np.array(record["windows"]["tokens"], dtype=np.float64)
    differences = np.array(record["windows"]["nll"]) - np.array(base["windows"]["nll"])
    mean = differences.sum() / tokens.sum()
    if len(tokens) < 2:
        return f"{mean:+.4f}"
    spread = np.square(differences - mean * tokens).sum() * len(tokens) / (len(tokens) - 1)
    return f"{mean:+.4f} ± {np.sqrt(spread) / tokens.sum():.4f}"
