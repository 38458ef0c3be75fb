"""`mesanet eval RUN --data DIR|FILE --length N ...`."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from mesanet.cli.data import unescaped
from mesanet.cli.dispatch import parse
from mesanet.config.base import check_in_range
from mesanet.config.evaluation import EvaluationConfig, SolverOverride


@dataclass(frozen=True, kw_only=True)
class SolverOptions:
    """How the mesa layers solve. Several values are tried one after the other, in all combinations."""

    max_steps: tuple[int, ...] = ()
    """The most steps that a token may take; as the model says if not given."""
    tolerance: tuple[float, ...] = ()
    """Relative residual at which a token stops, 0 for exactly max-steps steps; as the model says if not given."""
    preconditioner: Literal["auto", "none"] | None = None
    """none solves by the paper's plain method; as the model says if not given."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure a trained model's loss by token position; each record goes into RUN/evaluations."""

    run: Positional[Path]
    """Run folder, whose newest model is taken, or folder of a model."""
    data: tuple[Path, ...]
    """Folders that `mesanet data prepare` wrote, or files and folders of text."""
    split: Literal["train", "validation"] = "validation"
    """Split of prepared folders."""
    text_column: str = "text"
    """For text: field of a JSON record, or column of a table, that holds it."""
    separator: str | None = None
    """For text: what stands between the documents of a .txt file, such as <|endoftext|>; without it a file is one."""
    length: tuple[int, ...] = (2048,)
    """Documents are cut into windows of this many tokens, and each is read without the ones before it."""
    at_least: int = 0
    """Leave out documents of fewer tokens."""
    whole: bool = False
    """Leave out what remains of a document after its last whole window."""
    packed: bool = False
    """Fill up what is shorter than a window with further documents, BOS between them, as in training and as the paper
    evaluates; positions then count from the start of the window. Without it each document is read by itself."""
    max_tokens: int | None = None
    """Stop at this many tokens, taken from documents in a seeded order; None for all."""
    seed: int = 0
    """The order of documents where max-tokens is given, and that of packing."""
    solver: SolverOptions = field(default_factory=SolverOptions)
    """How the mesa layers solve."""
    relative_to: Path | None = None
    """Another run, already evaluated in the same way: the table shows by how much this one differs from it."""
    buckets: int = 8
    """Rows of the table by position."""
    scale: Literal["log", "linear"] = "log"
    """Buckets of positions in equal ratios, or of equal size."""
    tokenizer: str | None = None
    """The model's tokenizer: bytes, gpt2 or a tokenizer.json; if not given, the one of the run."""
    piece: int = 2048
    """Tokens that are computed at once: windows that are longer are fed in pieces through the cache."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 computes the large products in it."""
    device: str = "cpu"
    """Where to compute: cpu or cuda."""
    again: bool = False
    """Evaluate again what is recorded already."""


def run(arguments: list[str]) -> None:
    """Evaluate and print."""
    options = parse(Options, arguments, program="mesanet eval")
    check_in_range("buckets", options.buckets, 1)
    configs = [
        EvaluationConfig(
            data=data,
            split=options.split,
            text_column=options.text_column,
            separator=unescaped(options.separator),
            length=length,
            at_least=options.at_least,
            whole=options.whole,
            packed=options.packed,
            max_tokens=options.max_tokens,
            seed=options.seed,
            piece=options.piece,
            precision=options.precision,
        )
        for data, length in product(options.data, options.length)
    ]
    steps, tolerances = options.solver.max_steps or (None,), options.solver.tolerance or (None,)
    solvers = [
        SolverOverride(max_steps=most, tolerance=limit, preconditioner=options.solver.preconditioner)
        for most, limit in product(steps, tolerances)
    ]
    from mesanet.evaluation.run import current_weights, evaluate_run
    from mesanet.report.evaluations import counterpart, evaluations_table, positions_table

    # A run that is not there is no reason to wait for.
    weights = None if options.relative_to is None else current_weights(options.relative_to)
    found = evaluate_run(
        options.run, configs, solvers, tokenizer=options.tokenizer, device=options.device, again=options.again
    )
    bases = None
    if options.relative_to is not None and weights is not None:
        bases = [counterpart(options.relative_to, each.record, weights) for each in found]
    print(evaluations_table([each.record for each in found], bases))
    for number, each in enumerate(found):
        print(f"\n{each.path}{'' if each.fresh else ' (was there already; --again evaluates it anew)'}")
        base = None if bases is None else bases[number]
        print(positions_table(each.record, base, buckets=options.buckets, scale=options.scale))
