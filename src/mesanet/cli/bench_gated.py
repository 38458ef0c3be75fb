"""`mesanet bench gated`: the recurrent ops beside softmax attention and the delta rule of transformers."""

from mesanet.cli.dispatch import parse


def run(arguments: list[str]) -> None:
    """Run the benchmark, show its table, and write the record and the figure."""
    from mesanet.bench.gated import GatedBenchmark, run_gated_benchmark

    run_gated_benchmark(parse(GatedBenchmark, arguments, program="mesanet bench gated"))
