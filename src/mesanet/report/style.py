"""How figures look: one colour and one name for each mixer, wherever it appears."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO, StringIO
from itertools import cycle
from pathlib import Path
from typing import Any

from mesanet.io import write_atomic, write_text_atomic
from mesanet.optional import import_optional

NAMES = {
    "attention": "Attention",
    "sliding_window": "Sliding window",
    "mamba2": "Mamba2",
    "gla": "GLA",
    "deltanet": "DeltaNet",
    "gated_deltanet": "Gated DeltaNet",
    "mlstm": "mLSTM",
    "hawk": "Hawk",
    "longhorn": "LongHorn",
    "mesa": "Mesa",
    "mesa_rls": "Mesa (original)",
    "hawk-mesa": "Hawk-Mesa",
}
COLOURS = {
    "mesa": "#c1272d",
    "attention": "#222222",
    "gated_deltanet": "#1f6fb4",
    "deltanet": "#62b5e5",
    "gla": "#2e8b57",
    "mamba2": "#8f6bb8",
    "mlstm": "#e08a1e",
    "hawk": "#b5892b",
    "sliding_window": "#888888",
    "longhorn": "#3aa6a0",
    "mesa_rls": "#e58a8d",
    "hawk-mesa": "#a8327e",
}
OTHERS = ("#5d7a1f", "#7a4b2a", "#445e9e", "#d05a8a", "#4a4a4a")
SETTINGS = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial"],
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.fonttype": "path",
}


def mixer_name(pattern: str) -> str:
    """The name of a mixer, or of a pattern of mixers."""
    return NAMES.get(pattern) or "-".join(NAMES.get(part, part) for part in pattern.split("-"))


def mixer_colours(patterns: Sequence[str]) -> dict[str, str]:
    """The colour of each mixer; patterns that are not in the table get the others in the order in which they come."""
    others = cycle(OTHERS)
    return {pattern: COLOURS.get(pattern) or next(others) for pattern in patterns}


@contextmanager
def drawing(name: str) -> Iterator[None]:
    """Draw inside the block with the report's settings; the same data give the same bytes."""
    matplotlib = import_optional("matplotlib", "report")
    with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": name}):
        yield


def new_figure(panels: int = 1, *, rows: int = 1, height: float = 3.7) -> tuple[Any, Any]:
    """A figure as wide as the page's text, and its axes row by row; the height is that of a row."""
    figure_module = import_optional("matplotlib.figure", "report")
    figure = figure_module.Figure(figsize=(8.6, height * rows), layout="constrained")
    return figure, list(figure.subplots(rows, panels, squeeze=False).flat)


def save_figure(figure: Any, folder: Path, name: str) -> str:
    """Write NAME.svg and NAME.png, and return the SVG as it can stand inside a page."""
    text = StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": "mesanet"})
    write_text_atomic(folder / f"{name}.svg", text.getvalue())
    image = BytesIO()
    figure.savefig(image, format="png", dpi=150, metadata={"Software": "mesanet"})
    write_atomic(folder / f"{name}.png", lambda file: file.write(image.getvalue()))
    return inline_svg(text.getvalue(), name)


def inline_svg(text: str, name: str) -> str:
    """An SVG without its XML head, as wide as the page allows, its ids made unique by the name."""
    text = text[text.index("<svg") :]
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'(xlink:href|href)="#([^"]+)"', rf'\1="#{name}-\2"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", text)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    head, rest = text.split(">", 1)
    head = re.sub(r'\s(width|height)="[^"]*"', "", head)
    return f'{head} role="img">{rest}'
