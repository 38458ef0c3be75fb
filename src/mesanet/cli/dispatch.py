"""From the words of a command line to the function that runs them, importing nothing else on the way."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NoReturn, TypeVar

from mesanet.errors import UserError

Options = TypeVar("Options")

DONE, USER_MISTAKE, INTERRUPTED = 0, 2, 130

# What a person can put right by another command line: a bad value, a file that is missing, in the way, or unreadable.
USER_MISTAKES = (
    ValueError,
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)


@dataclass(frozen=True)
class Command:
    """Where a command lives, and the line that --help shows for it."""

    module: str
    """Module with `run(arguments: list[str]) -> None`; imported only when the command is called."""
    summary: str
    """One line for the list of commands."""


def dispatch(arguments: list[str], commands: Mapping[str, Command], *, program: str) -> None:
    """Run the command that the first word names; without a word, or with --help, show the list."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview(commands, program))
        return
    name, *rest = arguments
    if name not in commands:
        raise UserError(_unknown(name, commands, program))
    importlib.import_module(commands[name].module).run(rest)


def parse(options: type[Options], arguments: list[str], *, program: str, default: Options | None = None) -> Options:
    """Read `arguments` into the dataclass `options`; --help shows its docstrings and defaults.

    What is not given is as in `default`, if there is one, else as the dataclass says.
    """
    import tyro

    if default is None:
        return tyro.cli(options, args=arguments, prog=program)
    return tyro.cli(options, args=arguments, prog=program, default=default)


def report_errors(run: Callable[[list[str]], None], arguments: list[str] | None = None) -> NoReturn:
    """Call `run` and leave the process with the exit code that belongs to how it ended."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        run(words)
        sys.stdout.flush()
    except USER_MISTAKES as error:
        if os.environ.get("MESANET_DEBUG"):
            traceback.print_exc()
        print(f"mesanet: {_sentence(error)}", file=sys.stderr)
        sys.exit(USER_MISTAKE)
    except KeyboardInterrupt:
        print("mesanet: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader went away, as `| head` does; point stdout elsewhere so that the interpreter's last flush is silent.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(DONE)
    sys.exit(DONE)


def _overview(commands: Mapping[str, Command], program: str) -> str:
    width = max(map(len, commands)) + 3
    lines = [f"usage: {program} COMMAND [OPTIONS]", "", "commands:"]
    lines += [f"  {name:{width}}{command.summary}" for name, command in commands.items()]
    lines += ["", f"`{program} COMMAND --help` shows a command's options and their defaults."]
    return "\n".join(lines)


def _unknown(name: str, commands: Mapping[str, Command], program: str) -> str:
    close = get_close_matches(name, commands, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{program} has no command {name!r}, only {', '.join(commands)}{hint}"


def _sentence(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {(error.strerror or type(error).__name__).lower()}"
    return str(error) or type(error).__name__
