"""The command line: it parses, calls and prints, and holds no logic of its own.

How to add a command
--------------------
1. Write a module `mesanet/cli/<command>.py` with `run(arguments: list[str]) -> None`; `arguments` are the words after
   the command. A command without subcommands describes its options as a frozen keyword-only dataclass and parses
   them with `parse`:

       @dataclass(frozen=True, kw_only=True)
       class Options:
           \"\"\"What the command does, in one sentence: it becomes the head of --help.\"\"\"

           out: Path = Path("runs/example")
           \"\"\"Folder for the results.\"\"\"

       def run(arguments: list[str]) -> None:
           options = parse(Options, arguments, program="mesanet example")
           from mesanet.example import do_it  # heavy imports here, so that --help stays fast

           do_it(...)

   A command with subcommands has a table of its own and calls `dispatch(arguments, TABLE, program="mesanet data")`.
2. Add one line to `COMMANDS` below.

Mistakes of the user's are raised, by the command or anything that it calls, as ValueError (UserError is one) or as the
usual OSError of a missing or unreadable file: `main` prints their text as one sentence on stderr and exits with code 2.
Code 0 means done and 130 means Ctrl-C. With MESANET_DEBUG=1 in the environment the traceback is shown as well.
"""

import os

from mesanet import __version__
from mesanet.cli.dispatch import Command, dispatch, parse, report_errors

__all__ = ["COMMANDS", "Command", "dispatch", "main", "parse"]

COMMANDS = {
    "bench": Command("mesanet.cli.bench", "measure speed beside a peer in the same run"),
    "compare": Command("mesanet.cli.compare", "train several mixers on the same data and write a report with figures"),
    "data": Command("mesanet.cli.data", "turn text into token shards, train a tokenizer, look at prepared data"),
    "eval": Command("mesanet.cli.eval", "measure a trained model's loss by token position, at any length"),
    "generate": Command("mesanet.cli.generate", "continue a text with a trained model"),
    "model": Command("mesanet.cli.model", "what models are made of: parameter counts"),
    "report": Command("mesanet.cli.report", "draw a comparison's report again, from its records"),
    "sweep": Command("mesanet.cli.sweep", "train with every learning rate of a grid"),
    "train": Command("mesanet.cli.train", "train a model: a preset, or a config file"),
}


def main(arguments: list[str] | None = None) -> None:
    """Run one command line, `sys.argv[1:]` by default, and exit with its code."""
    # torch reads this once, before its first tensor: huge pages make fresh memory several times cheaper on Linux.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    report_errors(_run, arguments)


def _run(words: list[str]) -> None:
    if words == ["--version"]:
        print(f"mesanet {__version__}")
    else:
        dispatch(words, COMMANDS, program="mesanet")
