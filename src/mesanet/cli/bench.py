"""`mesanet bench`: speed, always beside a peer in the same run."""

from mesanet.cli.dispatch import Command, dispatch

BENCHMARKS = {
    "gated": Command("mesanet.cli.bench_gated", "time the recurrent ops beside softmax attention and transformers"),
    "loader": Command(
        "mesanet.cli.bench_loader", "time training steps fed from prepared data beside steps fed from memory"
    ),
    "model": Command("mesanet.cli.bench_model", "time training and generation of whole models beside attention"),
    "op": Command("mesanet.cli.bench_op", "time the Mesa op beside softmax attention and a large matrix product"),
}


def run(arguments: list[str]) -> None:
    """Run the benchmark that the first word names."""
    dispatch(arguments, BENCHMARKS, program="mesanet bench")
