"""What the records of runs have to hold for tables and figures: a file that lacks some of it is refused by name."""

from __future__ import annotations

from mesanet.io import Shape

EVALUATION: Shape = {
    "kind": str,
    "created": str,
    "data": {"name": str, "fingerprint": str, "documents": (None, int)},
    "model": {"parameters": int, "weights_sha256": str},
    "settings": dict.fromkeys(
        ("split", "length", "at_least", "whole", "packed", "max_tokens", "seed", "piece", "precision"), object
    ),
    "override": {"max_steps": (None, int), "tolerance": (None, float), "preconditioner": (None, str)},
    "solver": (None, {"max_steps": int, "tolerance": float}),
    "steps": (None, {"mean": float}),
    "tokens_per_second": float,
    "summary": {"nll": float, "perplexity": (None, float), "tokens": int, "windows": int},
    "positions": {"sum": [float], "count": [int]},
    "windows": {"tokens": [int], "nll": [float]},
}
PLAN: Shape = {
    "preset": str,
    "mixers": [str],
    "length": int,
    "created": str,
    "data": str,
    "settings": {},
    "history": [{"command": [str], "machine": str, "mesanet": str, "torch": str}],
    "run": {
        "data": {"batch_size": int, "sequence_length": int},
        "training": {"steps": (None, int), "tokens": (None, int)},
        "model": {"layers": int, "width": int, "heads": int, "key_size": int, "vocabulary": int},
    },
    "evaluations": {"position": {"split": str}, "extrapolation": (None, {"split": str}), "solver": {"split": str}},
}
CORPUS: Shape = {"name": str, "fingerprint": str, "documents": int, "tokens": int, "unigram_entropy": float}
RUN_CONFIG: Shape = {"training": {"peak_learning_rate": float}}
EVALUATED: Shape = {"weights_sha256": str}
SAMPLE: Shape = {"prompt": str, "text": str, "tokens_per_second": float, "model": EVALUATED}
METRIC: Shape = {"kind": str, "step": int, "tokens": int, "loss": float}
"""A line of metrics.jsonl."""
