"""The figures of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mesanet.optional import import_optional
from mesanet.report.comparison import Comparison, Run
from mesanet.report.evaluations import Record
from mesanet.report.positions import bucket_difference, bucket_means, log_spaced, mean_so_far, positions_of
from mesanet.report.style import mixer_name, new_figure

BUCKETS = 16
"""Buckets of positions, in equal ratios."""
Draw = Callable[[Comparison], Any]
SMOOTHED = 120
"""Points of a training curve; each is the mean of the updates in between."""


def training_curves(comparison: Comparison) -> Any | None:
    """Training loss, and the loss on held-out text as dots, against tokens; the unigram entropy as a line."""
    runs = [run for run in comparison.runs if run.training]
    if not runs:
        return None
    figure, (axes,) = new_figure()
    for run in runs:
        tokens, losses = (np.array([record[name] for record in run.training]) for name in ("tokens", "loss"))
        parts = [part for part in np.array_split(np.arange(len(tokens)), SMOOTHED) if len(part)]
        axes.plot(
            [tokens[part].mean() for part in parts],
            [losses[part].mean() for part in parts],
            color=comparison.colours[run.mixers],
            label=mixer_name(run.mixers),
        )
        axes.plot(
            [record["tokens"] for record in run.validation],
            [record["loss"] for record in run.validation],
            "o",
            color=comparison.colours[run.mixers],
            markersize=4.5,
            markeredgecolor="white",
            markeredgewidth=0.7,
        )
    if comparison.corpus is not None:
        _entropy_line(axes, comparison.corpus["unigram_entropy"])
    axes.set_xlabel("tokens trained on")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title("Training (lines) and held-out text (dots)")
    axes.xaxis.set_major_formatter(_counts())
    axes.set_xlim(left=0)
    # The first updates would squeeze all that matters into the lower half.
    top = max(float(np.quantile([record["loss"] for record in run.training], 0.98)) for run in runs)
    entropy = comparison.corpus["unigram_entropy"] if comparison.corpus else 0
    axes.set_ylim(top=max(top, entropy) * 1.04)
    axes.legend()
    return figure


def loss_by_position(comparison: Comparison) -> Any | None:
    """NLL by position relative to attention; without attention, as it is."""
    runs = [run for run in comparison.runs if run.position is not None]
    if not runs:
        return None
    base = comparison.base
    relative = base is not None and base.position is not None and len(runs) > 1
    figure, axes = new_figure(2)
    for run in runs:
        assert run.position is not None
        positions = positions_of(run.position)
        style = {"color": comparison.colours[run.mixers], "label": mixer_name(run.mixers)}
        absolute = bucket_means(positions, BUCKETS)
        axes[0].plot(absolute.position, absolute.value, **style)
        if relative and base is not None and base.position is not None:
            curve = bucket_difference(positions, positions_of(base.position), BUCKETS)
            axes[1].plot(curve.position, curve.value, "-o", markersize=3, **style)
        else:
            so_far = log_spaced(mean_so_far(positions))
            axes[1].plot(so_far.position, so_far.value, **style)
    axes[0].set_title("Loss by position")
    axes[0].set_ylabel("NLL (nats per token)")
    axes[1].set_title("Relative to attention" if relative else "Mean so far")
    axes[1].set_ylabel("difference of NLL (below 0: better)" if relative else "mean-so-far NLL")
    for each in axes:
        _log_positions(each, comparison.length)
    axes[0].legend()
    return figure


def length_extrapolation(comparison: Comparison) -> Any | None:
    """Mean-so-far perplexity up to lengths beyond that of training."""
    runs = [run for run in comparison.runs if run.extrapolation is not None]
    if not runs:
        return None
    figure, axes = new_figure(2)
    longest = 0
    for run in runs:
        assert run.extrapolation is not None
        positions = positions_of(run.extrapolation)
        longest = max(longest, len(positions.sums))
        style = {"color": comparison.colours[run.mixers], "label": mixer_name(run.mixers)}
        so_far = log_spaced(np.exp(mean_so_far(positions)))
        later = so_far.position >= min(16, longest)
        axes[0].plot(so_far.position[later], so_far.value[later], **style)
        means = bucket_means(positions, BUCKETS)
        later = means.position >= min(8, longest)
        axes[1].plot(means.position[later], means.value[later], **style)
    axes[0].set_title("Mean-so-far perplexity by length")
    axes[0].set_ylabel("perplexity of all tokens so far")
    axes[1].set_title("Loss by position")
    axes[1].set_ylabel("NLL (nats per token)")
    for each in axes:
        _log_positions(each, longest)
        each.axvline(comparison.length, color="#999999", linestyle="--", linewidth=1, label="training length")
    axes[0].set_xlim(left=min(16, longest))
    axes[1].set_xlim(left=min(8, longest))
    axes[0].legend(loc="upper right")
    return figure


def solver_effort(comparison: Comparison) -> Any | None:
    """Loss against the mean number of solver steps, for fixed steps and for tolerances; and where it is lost.

    A row for each model that solves.
    """
    runs = [run for run in comparison.runs if len(run.solver) > 1]
    if not runs:
        return None
    figure, axes = new_figure(2, rows=len(runs))
    for number, run in enumerate(runs):
        uniform, adaptive = _families(run)
        effort, lost = axes[2 * number : 2 * number + 2]
        _loss_by_steps(effort, uniform, adaptive)
        effort.set_title(f"{mixer_name(run.mixers)}: loss by mean solver steps")
        _lost_by_position(lost, uniform, adaptive)
        _log_positions(lost, comparison.length)
    return figure


def speed(comparison: Comparison) -> Any | None:
    """Tokens per second in training, in reading and in generating."""
    runs = [run for run in comparison.runs if run.tokens_per_second is not None]
    if not runs:
        return None
    panels: Sequence[tuple[str, list[float | None]]] = [
        ("Training", [run.tokens_per_second for run in runs]),
        ("Reading (evaluation)", [_rate(run.position) for run in runs]),
        ("Generating, one by one", [_rate(run.sample) for run in runs]),
    ]
    figure, axes = new_figure(3, height=1.1 + 0.36 * len(runs))
    places = np.arange(len(runs))
    for number, (panel, (title, values)) in enumerate(zip(axes, panels, strict=True)):
        bars = panel.barh(
            places, [value or 0 for value in values], color=[comparison.colours[run.mixers] for run in runs]
        )
        panel.bar_label(bars, [f" {value:,.0f}" if value else " -" for value in values], fontsize=8)
        panel.set_yticks(places, [mixer_name(run.mixers) for run in runs] if number == 0 else [""] * len(runs))
        panel.invert_yaxis()
        panel.set_title(title)
        panel.set_xlabel("tokens per second")
        panel.xaxis.set_major_formatter(_counts())
        panel.locator_params(axis="x", nbins=3)
        panel.margins(x=0.28)
        panel.grid(axis="y", visible=False)
    return figure


FIGURES: dict[str, Draw] = {
    "training": training_curves,
    "by_position": loss_by_position,
    "extrapolation": length_extrapolation,
    "solver": solver_effort,
    "speed": speed,
}


def _rate(record: Record | None) -> float | None:
    return None if record is None else float(record["tokens_per_second"])


def _families(run: Run) -> tuple[list[Record], list[Record]]:
    """Records of fixed steps, fewest first, and of tolerances, loosest first."""
    uniform = [record for record in run.solver if record["solver"]["tolerance"] == 0]
    adaptive = [record for record in run.solver if record["solver"]["tolerance"] != 0]
    return (
        sorted(uniform, key=lambda record: int(record["solver"]["max_steps"])),
        sorted(adaptive, key=lambda record: -float(record["solver"]["tolerance"])),
    )


def _loss_by_steps(axes: Any, uniform: list[Record], adaptive: list[Record]) -> None:
    """A curve of fixed steps and one of tolerances, each dot with its setting."""
    families = ((uniform, "fixed steps", "#a83232", 6), (adaptive, "tolerance", "#2a5fa8", -12))
    for records, label, colour, above in families:
        if not records:
            continue
        steps = [record["steps"]["mean"] for record in records]
        nll = [record["summary"]["nll"] for record in records]
        axes.plot(steps, nll, "-o", color=colour, markersize=4.5, label=label)
        for record in records:
            axes.annotate(
                _setting(record),
                (record["steps"]["mean"], record["summary"]["nll"]),
                (0, above),
                textcoords="offset points",
                fontsize=7.5,
                ha="center",
                color=colour,
            )
    axes.margins(0.08, 0.14)
    axes.set_xlabel("mean steps of a token")
    axes.set_ylabel("NLL (nats per token)")
    axes.legend()


def _lost_by_position(axes: Any, uniform: list[Record], adaptive: list[Record]) -> None:
    """By how much each setting is worse than the one with the most effort, by position."""
    best = positions_of((adaptive or uniform)[-1])
    for records, colours in ((uniform, "Reds"), (adaptive, "Blues")):
        for place, record in enumerate(records):
            if record is (adaptive or uniform)[-1]:
                continue
            shade = _colours(colours)(0.9 - 0.6 * place / max(len(records) - 1, 1))
            curve = bucket_difference(positions_of(record), best, BUCKETS // 2)
            axes.plot(curve.position, curve.value, color=shade, linewidth=1.4, label=_setting(record))
    axes.set_title("Loss beyond the most accurate")
    axes.set_ylabel("difference of NLL")
    axes.legend(ncols=2, fontsize=7.5, title="steps / tolerance", title_fontsize=7.5)


def _colours(name: str) -> Any:
    return import_optional("matplotlib", "report").colormaps[name]


def _setting(record: Record) -> str:
    solver = record["solver"]
    return str(solver["max_steps"]) if solver["tolerance"] == 0 else f"{solver['tolerance']:.0e}".replace("e-0", "e-")


def _entropy_line(axes: Any, entropy: float) -> None:
    axes.axhline(entropy, color="#777777", linestyle=":", linewidth=1.4)
    axes.annotate(
        f"unigram entropy {entropy:.2f}",
        (1, entropy),
        (-2, 3),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
        fontsize=8.5,
        color="#666666",
    )


def _log_positions(axes: Any, longest: int) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlim(1, longest)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("position in the sequence")
    if axes.get_yscale() == "linear" and axes.get_ylim()[0] < 0 < axes.get_ylim()[1]:
        axes.axhline(0, color="#999999", linewidth=0.8)


def _counts() -> Any:
    return import_optional("matplotlib.ticker", "report").EngFormatter(sep="")
