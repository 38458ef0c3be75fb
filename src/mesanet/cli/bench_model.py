"""`mesanet bench model`: training and generation speed of whole models, and what a token costs."""

from mesanet.cli.dispatch import parse


def run(arguments: list[str]) -> None:
    """Run the benchmark, show its tables, and write the record and the figure."""
    from mesanet.bench.model import ModelBenchmark, run_model_benchmark

    run_model_benchmark(parse(ModelBenchmark, arguments, program="mesanet bench model"))
