"""The report of a comparison: one page that needs nothing beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mesanet.io import write_text_atomic
from mesanet.report.comparison import Comparison, read_comparison
from mesanet.report.figures import FIGURES
from mesanet.report.style import drawing, mixer_name, save_figure
from mesanet.report.tables import escape, extrapolation_table, html_table, perplexity_table, solver_table

CSS = """
:root { color-scheme: light; }
body { margin: 0 auto; padding: 2.2rem 1.4rem 4rem; max-width: 64rem; background: #fff; color: #222;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .5rem; border-top: 1px solid #ddd; padding-top: 1.4rem; }
p, li { max-width: 48rem; }
.lead, .note, figcaption { color: #555; }
.note, figcaption { font-size: .88rem; }
figure { margin: 1rem 0; }
figure svg { display: block; width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .92rem; margin: .8rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .32rem .9rem .32rem 0; text-align: right; border-bottom: 1px solid #e6e6e6; white-space: nowrap; }
th { border-bottom: 1.5px solid #999; font-weight: 600; }
th:first-child, td:first-child { text-align: left; }
pre { background: #f6f6f4; padding: .8rem 1rem; overflow-x: auto; font-size: .82rem; line-height: 1.45;
  border-left: 4px solid #ccc; white-space: pre-wrap; overflow-wrap: anywhere; }
pre .prompt { color: #888; }
code { font-size: .9em; background: #f6f6f4; padding: .1em .3em; }
"""
CAPTIONS = {
    "training": "Every model saw the same tokens in the same order. A line is the mean over neighbouring updates; "
    "dots are the loss on held-out text. A model that knew only how frequent each token is could not get below the "
    "dotted line.",
    "by_position": "NLL of the k-th token of a window given the ones before it, averaged over buckets of positions; "
    "on the right less that of attention on the same tokens, where below zero is better.",
    "extrapolation": "Held-out documents that are longer than the training length (dashed), read from their beginning. "
    "Left: perplexity of all tokens up to a length; right: loss of the tokens at a position.",
    "solver": "The same model with less effort of its solver at test time: a fixed number of plain conjugate gradient "
    "steps for every token, which is the paper's uniform reduction, or as many steps of the model's own solver, which "
    "has a preconditioner, as each token needs for a relative residual (numbers at the dots).",
    "speed": "Measured on the machine below, one model after the other; generating without the reading of the prompt.",
}


def build_report(folder: Path) -> Path:
    """Read the records in `folder`, draw every figure that they allow, and write report/index.html."""
    comparison = read_comparison(folder)
    target = folder / "report"
    figures: dict[str, str] = {}
    for name, draw in FIGURES.items():
        with drawing(name):
            figure = draw(comparison)
            if figure is not None:
                figures[name] = save_figure(figure, target / "figures", name)
    return write_text_atomic(target / "index.html", "\n".join(_page(comparison, figures)))


def _page(comparison: Comparison, figures: dict[str, str]) -> Iterator[str]:
    layers = "sequence layer" if len(comparison.runs) == 1 else "sequence layers"
    title = f"{len(comparison.runs)} {layers} on the same tokens"
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>mesanet compare {escape(comparison.plan['preset'])}</title>\n<style>{CSS}</style>\n</head>\n<body>"
    yield f'<h1>{escape(title)}</h1>\n<p class="lead">{_introduction(comparison)}</p>'
    for heading, part in SECTIONS.items():
        body = "\n".join(part(comparison, figures))
        if body:
            yield f"<section>\n<h2>{escape(heading)}</h2>\n{body}\n</section>"
    yield "</body>\n</html>\n"


def _introduction(comparison: Comparison) -> str:
    data, training = comparison.plan["run"]["data"], comparison.plan["run"]["training"]
    steps = training["steps"]
    tokens = steps * data["batch_size"] * data["sequence_length"] if steps else training["tokens"]
    alike = len({run.learning_rate for run in comparison.runs}) == 1
    rates = "optimised alike" if alike else "each with the peak learning rate in the table, and all else alike"
    names = ", ".join(escape(mixer_name(run.mixers)) for run in comparison.runs)
    return (
        f"{names}: one backbone, the same data in the same order, {tokens:,} training tokens in sequences of "
        f"{comparison.length:,}, {rates}."
    )


def _perplexity(comparison: Comparison, figures: dict[str, str]) -> Iterator[str]:
    table = perplexity_table(comparison)
    if table.rows:
        record = next(run.position for run in comparison.runs if run.position is not None)
        summary = record["summary"]
        yield _wide(html_table(table))
        yield (
            f'<p class="note">{summary["tokens"]:,} held-out tokens in {summary["windows"]:,} windows of at most '
            f"{record['settings']['length']:,}. The difference to attention is paired by window, ± one standard error; "
            "it says nothing of how much another seed of training would change. These windows are cut out of single "
            "documents, while those of the validation during training, the dots below, are packed.</p>"
        )
    yield from _figure("training", figures)


def _positions(comparison: Comparison, figures: dict[str, str]) -> Iterator[str]:
    yield from _figure("by_position", figures)


def _extrapolation(comparison: Comparison, figures: dict[str, str]) -> Iterator[str]:
    yield from _figure("extrapolation", figures)
    table = extrapolation_table(comparison)
    if table.rows:
        yield "<p>Mean-so-far perplexity at multiples of the training length:</p>"
        yield _wide(html_table(table))
        record = next(run.extrapolation for run in comparison.runs if run.extrapolation is not None)
        yield (
            f'<p class="note">{record["summary"]["windows"]:,} stretches of {record["settings"]["length"]:,} tokens '
            f"from {record['data']['documents']:,} held-out documents.</p>"
        )
    elif figures:
        yield '<p class="note">No held-out document is long enough for this.</p>'


def _solver(comparison: Comparison, figures: dict[str, str]) -> Iterator[str]:
    yield from _figure("solver", figures)
    for run in comparison.runs:
        if run.solver:
            yield f"<p>{escape(mixer_name(run.mixers))}:</p>"
            yield _wide(html_table(solver_table(run)))


def _speed(comparison: Comparison, figures: dict[str, str]) -> Iterator[str]:
    yield from _figure("speed", figures)


def _samples(comparison: Comparison, figures: dict[str, str]) -> Iterator[str]:
    for run in comparison.runs:
        if run.sample is not None:
            prompt, text = escape(run.sample["prompt"]), escape(run.sample["text"])
            colour = comparison.colours[run.mixers]
            yield f"<p>{escape(mixer_name(run.mixers))}:</p>"
            yield f'<pre style="border-color: {colour}"><span class="prompt">{prompt}</span>{text}</pre>'


def _provenance(comparison: Comparison, figures: dict[str, str]) -> Iterator[str]:
    plan, model = comparison.plan, comparison.plan["run"]["model"]
    yield "<ul>"
    history = plan["history"]
    for words in dict.fromkeys(" ".join(each["command"]) for each in history):
        yield f"<li>Command: <code>{escape(words)}</code></li>"
    yield (
        f"<li>Model: {model['layers']} layers of width {model['width']}, {model['heads']} heads of key size "
        f"{model['key_size']}, vocabulary {model['vocabulary']:,}</li>"
    )
    if comparison.corpus is not None:
        corpus = comparison.corpus
        yield (
            f"<li>Data: {escape(corpus['name'])}, {corpus['tokens']:,} tokens in {corpus['documents']:,} documents, "
            f"unigram entropy {corpus['unigram_entropy']:.3f} nats, fingerprint "
            f"<code>{escape(corpus['fingerprint'][:16])}</code></li>"
        )
    for machine in dict.fromkeys(each["machine"] for each in history):
        yield f"<li>Machine: {escape(machine)}</li>"
    for mesanet, torch in dict.fromkeys((each["mesanet"], each["torch"]) for each in history):
        yield f"<li>mesanet {escape(mesanet)}, torch {escape(torch)}</li>"
    yield f"<li>Begun {escape(plan['created'])}</li>"
    yield "</ul>"


def _figure(name: str, figures: dict[str, str]) -> Iterator[str]:
    if name in figures:
        yield f'<figure id="{name}">\n{figures[name]}\n<figcaption>{escape(CAPTIONS[name])}</figcaption>\n</figure>'


def _wide(text: str) -> str:
    return f'<div class="wide">{text}</div>'


Part = Callable[[Comparison, dict[str, Any]], Iterator[str]]
SECTIONS: dict[str, Part] = {
    "Perplexity": _perplexity,
    "Early and late in the sequence": _positions,
    "Longer than in training": _extrapolation,
    "Solver steps": _solver,
    "Speed": _speed,
    "What they write": _samples,
    "How this was made": _provenance,
}
