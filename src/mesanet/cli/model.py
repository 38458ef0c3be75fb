"""`mesanet model`: what models are made of."""

from mesanet.cli.dispatch import Command, dispatch

TABLE = {
    "parameters": Command("mesanet.cli.model_parameters", "print the exact number of parameters of every preset"),
}


def run(arguments: list[str]) -> None:
    """Run the command that the first word names."""
    dispatch(arguments, TABLE, program="mesanet model")
