"""From the words of a command line to the function that runs them, importing nothing else on the way."""

from __future__ import annotations

import errno
import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass
from difflib import get_close_matches
from io import BytesIO, StringIO, TextIOWrapper
from itertools import takewhile
from typing import Annotated, Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from mesanet.errors import UserError

Options = TypeVar("Options")

DONE, USER_MISTAKE, INTERRUPTED = 0, 2, 130

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


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

    What is not given is as in `default`, if there is one, else as the dataclass says. A mistake is a UserError of one
    sentence.
    """
    import tyro

    given: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with redirect_stderr(StringIO()):
            parsed: Options = tyro.cli(options, args=arguments, prog=program, **given)
            return parsed
    except SystemExit as ended:
        if ended.code == DONE:
            raise
    # Once more for its words: it draws a box around them, whose lines depend on what it takes for the terminal.
    told = TextIOWrapper(BytesIO(), encoding="utf-8")
    with redirect_stdout(told), redirect_stderr(told), suppress(SystemExit):
        tyro.cli(options, args=arguments, prog=program, **given)
    told.seek(0)
    raise UserError(_unboxed(told.read(), program))


def scan(options: type[Any], arguments: list[str], *, program: str) -> Any:
    """The values of the options that `arguments` give, None for all others, without any check of a config's own.

    For commands in which one option decides what the defaults of the others are.
    """
    words = [word for word in arguments if word not in ("-h", "--help")]
    try:
        return parse(_unchecked(options), words, program=program)
    except UserError:
        # The options themselves know better what they accept.
        parse(options, words, program=program)
        raise


def _unchecked(options: type[Any]) -> type[Any]:
    """A dataclass with the same options, None by default but for switches, that takes all values together."""
    hints = get_type_hints(options, include_extras=True)
    twins: list[Any] = []
    for each in fields(options):
        kind, default = hints[each.name], None if each.default is MISSING else each.default
        if is_dataclass(kind):
            twin = _unchecked(kind)  # type: ignore[arg-type]
            twins.append((each.name, twin, field(default_factory=twin)))
        elif isinstance(default, bool):
            twins.append((each.name, kind, default))
        else:
            inner, *more = get_args(kind) if get_origin(kind) is Annotated else (kind,)
            optional = inner | None
            twins.append((each.name, Annotated[(optional, *more)] if more else optional, None))
    return make_dataclass(options.__name__, twins, kw_only=True, frozen=True)


def report_errors(run: Callable[[list[str]], None], arguments: list[str] | None = None) -> NoReturn:
    """Call `run` and leave the process with the exit code that belongs to how it ended."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        run(words)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("mesanet: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader went away, as `| head` does; point stdout elsewhere so that the interpreter's last flush is silent.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(DONE)
    except Exception as error:
        if not is_mistake(error):
            raise
        if os.environ.get("MESANET_DEBUG"):
            traceback.print_exc()
        print(f"mesanet: {in_one_sentence(error)}", file=sys.stderr)
        sys.exit(USER_MISTAKE)
    sys.exit(DONE)


def is_mistake(error: Exception) -> bool:
    """Whether this is something that a person can put right.

    A bad value; a file that is missing, in the way or unreadable; a full disk; a connection that broke. What the
    operating system complains of is never a mistake in our code.
    """
    return isinstance(error, ValueError | OSError) or _is_of_the_net(error)


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


def _is_of_the_net(error: BaseException) -> bool:
    """Whether a library for the web raised this; not all of their errors are OSErrors."""
    return type(error).__module__.partition(".")[0] in ("httpx", "httpcore", "requests", "urllib3")


def in_one_sentence(error: BaseException) -> str:
    """What to tell the user, in one line."""
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        place = "" if error.filename is None else f" at {error.filename}"
        return f"the disk is full{place}: make room and give the command again{notes}"
    if _is_of_the_net(error) or isinstance(error, ConnectionError | TimeoutError):
        return f"the connection failed ({_one_line(error)}): give the command again when there is one"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {(error.strerror or type(error).__name__).lower()}"
    return _one_line(error)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _unboxed(box: str, program: str) -> str:
    """The mistake in one of tyro's boxes, which have a title, the mistake, a rule, and what may have been meant."""
    lines = [line.strip("│") for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    said = " ".join(" ".join(lines).split())
    mistake = re.split(r" ─{3,} | Got errors:", said)[0].rstrip(".")
    unknown = mistake.partition("Unrecognized options: ")[2].split(", ")
    alike = re.findall(r"(--[\w.-]+)", said.partition("Perhaps you meant: ")[2])
    meant = [*get_close_matches(unknown[0], alike, n=1), *alike]
    hint = f"did you mean {meant[0]}?" if meant else f"`{program} --help` shows all options"
    wrong = re.fullmatch(r"Error parsing (\S+): no type matching (.+) could be instantiated from \[(.*)\]", mistake)
    # The names of what is missing stand four columns further in than the rest, and their explanations eight.
    body = takewhile(lambda line: "───" not in line, lines)
    missing = [line.split()[0] for line in body if re.match(r" {5}\S", line)]
    empty = re.match(r"Missing value for argument '(\S+)'", mistake)
    if unknown != [""]:
        name = next((word for word in unknown if word.startswith("-")), unknown[0])
        mistake = f"there is no option {name}" if name.startswith("-") else f"{name!r} is one word too many"
    elif wrong is not None:
        mistake = f"{wrong[1]}: got {wrong[3]}, expected {wrong[2]}"
    elif empty is not None:
        mistake = f"{empty[1]} needs a value"
    elif mistake.startswith("Missing from") and missing:
        mistake = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
    if mistake[1:2].islower():
        mistake = mistake[0].lower() + mistake[1:]
    return f"{mistake}; {hint}"
