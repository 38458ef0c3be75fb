"""`mesanet generate`: continue a text with a trained model."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path

from mesanet.cli.dispatch import parse
from mesanet.config.evaluation import SolverOverride
from mesanet.config.generation import GenerationConfig


@dataclass(frozen=True, kw_only=True)
class Options:
    """Continue a prompt with a trained model, and show the text as it comes."""

    model: Path
    """Folder of a model, or of a run, whose newest model is taken."""
    prompt: str = ""
    """The text to continue; "-" reads it from standard input."""
    tokenizer: str | None = None
    """bytes, gpt2 or a tokenizer.json; if not given, the one beside the model, or the one that its vocabulary tells."""
    stop: tuple[str, ...] = ()
    """Texts at which to stop; they are not shown."""
    generation: GenerationConfig = field(default_factory=lambda: GenerationConfig(temperature=0.8, top_p=0.95))
    """How tokens are chosen."""
    solver: SolverOverride = field(default_factory=SolverOverride)
    """How the mesa layers solve."""
    device: str = "cpu"
    """Where to compute: cpu or cuda."""


def run(arguments: list[str]) -> None:
    """Load, generate, print."""
    options = parse(Options, arguments, program="mesanet generate")
    from mesanet.data.tokenizer import load_tokenizer
    from mesanet.model.files import find_model, load_model, tokenizer_name
    from mesanet.model.text import stream_text, terminal_safe

    folder = find_model(options.model)
    model = load_model(folder, device=options.device)
    solver = options.solver
    model.set_solver(max_steps=solver.max_steps, tolerance=solver.tolerance, preconditioner=solver.preconditioner)
    name = options.tokenizer or tokenizer_name(options.model, folder, model.config.vocabulary)
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    if isinstance(sys.stdout, TextIOWrapper):
        # A character that the terminal's encoding lacks must not end the text.
        sys.stdout.reconfigure(errors="replace")
    shown = terminal_safe if sys.stdout.isatty() else str
    # First, since it refuses what does not fit: a mistake then leaves nothing on the output.
    pieces = stream_text(model, load_tokenizer(name), prompt, options.generation, options.stop)
    print(shown(prompt), end="", flush=True)
    for piece in pieces:
        print(shown(piece), end="", flush=True)
    print()
