"""Records of evaluations: finding them, and showing them as plain tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mesanet.errors import UserError
from mesanet.io import check_shape, read_json
from mesanet.report.positions import bucket_edges, bucket_sums, by_position, mean_so_far, positions_of
from mesanet.report.shapes import EVALUATION

FOLDER = "evaluations"
Record = dict[str, Any]


def read_evaluations(run: Path) -> Iterator[Record]:
    """The records of a run's evaluations, in the order of their names."""
    for path in sorted((run / FOLDER).glob("*.json")):
        record = read_json(path)
        if isinstance(record, dict) and record.get("kind") == "evaluation":
            check_shape(path, record, EVALUATION)
            yield record


def counterpart(run: Path, record: Record, weights: str) -> Record:
    """The evaluation of another run, with the weights of this hash, on the same tokens in the same windows.

    Its solver is as it comes, and of several records the newest counts.
    """
    precision = record["settings"]["precision"]
    found = newest(
        other
        for other in read_evaluations(run)
        if same_tokens(other, record)
        and not overridden(other)
        and other["model"]["weights_sha256"] == weights
        and other["settings"]["precision"] == precision
    )
    if found is not None:
        return found
    raise UserError(
        f"{run} has no evaluation of its model on {record['data']['name']} at length {record['settings']['length']} in "
        "the same windows: run the same `mesanet eval` on it first"
    )


def newest(records: Iterable[Record]) -> Record | None:
    """The record that was made last."""
    return max(records, key=lambda record: str(record["created"]), default=None)


def same_tokens(first: Record, second: Record) -> bool:
    """Whether two records are of the same tokens, cut in the same way."""
    return first["data"]["fingerprint"] == second["data"]["fingerprint"] and all(
        first["settings"][name] == second["settings"][name]
        for name in ("length", "at_least", "whole", "packed", "max_tokens", "seed")
    )


def overridden(record: Record) -> bool:
    """Whether the solver was told something else than what the model says."""
    return any(value is not None for value in record["override"].values())


def evaluations_table(records: Sequence[Record], bases: Sequence[Record] | None = None) -> str:
    """A line for each record."""
    head = ["data", "length", "solver", "tokens", "nll", "perplexity", "mean steps", "tokens/s"]
    rows = []
    for number, record in enumerate(records):
        summary = record["summary"]
        row = [
            record["data"]["name"],
            f"{record['settings']['length']:,}",
            solver_text(record),
            f"{summary['tokens']:,}",
            f"{summary['nll']:.4f}",
            "-" if summary["perplexity"] is None else f"{summary['perplexity']:.3f}",
            "-" if record["steps"] is None else f"{record['steps']['mean']:.2f}",
            f"{record['tokens_per_second']:,.0f}",
        ]
        if bases is not None:
            row.append(f"{summary['nll'] - bases[number]['summary']['nll']:+.4f}")
        rows.append(row)
    return plain_table(head if bases is None else [*head, "difference"], rows)


def positions_table(record: Record, base: Record | None = None, *, buckets: int = 8, scale: str = "log") -> str:
    """A line for each bucket of positions: the mean loss there, that of all tokens so far, and the difference."""
    positions = positions_of(record)
    edges = bucket_edges(len(positions.sums), buckets, scale)
    sums, so_far = bucket_sums(positions, edges), mean_so_far(positions)
    means = by_position(sums)
    head = ["positions", "tokens", "nll", "perplexity", "nll so far", "perplexity so far"]
    rows = []
    others = None if base is None else by_position(bucket_sums(positions_of(base), edges))
    for number, (first, last) in enumerate(zip(edges[:-1] + 1, edges[1:], strict=True)):
        span = f"{first:,}" if first == last else f"{first:,}-{last:,}"
        nll, until = means[number], so_far[last - 1]
        row = [span, f"{sums.counts[number]:,}"]
        row += [_number(nll, ".4f"), _number(np.exp(nll), ".3f"), _number(until, ".4f"), _number(np.exp(until), ".3f")]
        if others is not None:
            row.append(_number(nll - others[number], "+.4f"))
        rows.append(row)
    return plain_table(head if base is None else [*head, "difference"], rows)


def _number(value: float, form: str) -> str:
    """A dash where there is no token to take a mean of."""
    return "-" if np.isnan(value) else format(value, form)


def solver_text(record: Record) -> str:
    """The solver's settings in a few characters."""
    solver = record["solver"]
    if solver is None:
        return "-"
    if solver["tolerance"] == 0:
        return f"{solver['max_steps']} step{'' if solver['max_steps'] == 1 else 's'}"
    return f"{solver['tolerance']:g}, at most {solver['max_steps']}"


def plain_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns under a head, the first one to the left and the others to the right."""
    widths = [max(len(line[column]) for line in (head, *rows)) for column in range(len(head))]
    lines = []
    for line in (head, *rows):
        cells = [
            line[0].ljust(widths[0]),
            *(text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True)),
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * (sum(widths) + 2 * (len(widths) - 1)))
    return "\n".join(lines)
