"""`mesanet data`: from text to token shards."""

from mesanet.cli.dispatch import Command, dispatch

COMMANDS = {
    "prepare": Command("mesanet.cli.data_prepare", "turn text into token shards that training reads"),
    "tokenizer": Command("mesanet.cli.data_tokenizer", "train a byte-level BPE tokenizer on a corpus"),
    "speed": Command("mesanet.cli.data_speed", "measure how fast sources become token shards"),
    "show": Command("mesanet.cli.data_show", "say what a prepared folder holds, and check all of its files"),
}


def unescaped(separator: str | None) -> str | None:
    """A separator as it was meant: a shell hands on a line's end and a tab as \\n and \\t."""
    return None if separator is None else separator.replace("\\n", "\n").replace("\\t", "\t")


def run(arguments: list[str]) -> None:
    """Run the command that the first word names."""
    dispatch(arguments, COMMANDS, program="mesanet data")
