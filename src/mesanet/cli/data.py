"""`mesanet data`: from text to token shards."""

from mesanet.cli.dispatch import Command, dispatch

COMMANDS = {
    "prepare": Command("mesanet.cli.data_prepare", "turn text into token shards that training reads"),
    "tokenizer": Command("mesanet.cli.data_tokenizer", "train a byte-level BPE tokenizer on a corpus"),
    "speed": Command("mesanet.cli.data_speed", "measure how fast sources become token shards"),
    "show": Command("mesanet.cli.data_show", "say what a prepared folder holds, and check all of its files"),
}


def run(arguments: list[str]) -> None:
    """Run the command that the first word names."""
    dispatch(arguments, COMMANDS, program="mesanet data")
