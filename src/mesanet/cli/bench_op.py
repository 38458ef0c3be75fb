"""`mesanet bench op`: the Mesa op beside softmax attention and a large matrix product."""

from mesanet.cli.dispatch import parse


def run(arguments: list[str]) -> None:
    """Run the benchmark, show its table, and write the record and the figure."""
    from mesanet.bench.op import OpBenchmark, run_op_benchmark

    run_op_benchmark(parse(OpBenchmark, arguments, program="mesanet bench op"))
