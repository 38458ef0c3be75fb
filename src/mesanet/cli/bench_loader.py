"""`mesanet bench loader`: what feeding a training step from prepared data adds to it."""

from mesanet.cli.dispatch import parse


def run(arguments: list[str]) -> None:
    """Run the benchmark, say what came of it, and write the record."""
    from mesanet.bench.loader import LoaderBenchmark, run_loader_benchmark

    options = parse(LoaderBenchmark, arguments, program="mesanet bench loader")
    run_loader_benchmark(options, ["mesanet", "bench", "loader", *arguments])
